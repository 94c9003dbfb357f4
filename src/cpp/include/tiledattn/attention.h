// SPDX-License-Identifier: Apache-2.0
// Tiled decode attention: a running softmax state that KV is folded into, tile by tile.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "tiledattn/error.h"
#include "tiledattn/options.h"
#include "tiledattn/tensor.h"
#include "tiledattn/workspace.h"

namespace tiledattn {

/// (block, token, kv_head) strides of a KV pool, in elements.
struct PoolStrides {
  std::int64_t block = 0;
  std::int64_t token = 0;
  std::int64_t kv_head = 0;
};

/// The sizes of a TiledAttention; every buffer follows from them.
struct TILEDATTN_API TiledAttentionDims {
  std::int64_t max_seqs = 0;
  std::int64_t num_q_heads = 0;
  std::int64_t num_kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t block_size = 0;     ///< tokens in a KV block
  std::int64_t tile_capacity = 0;  ///< blocks in a tile
  std::int64_t max_q_len = 1;      ///< query tokens of each sequence
  std::int64_t head_dim_v = 0;     ///< 0 means head_dim

  /// Fills head_dim_v and throws ValueError naming the field, its value and what is allowed.
  TiledAttentionDims validated() const;

  std::int64_t value_dim() const { return head_dim_v ? head_dim_v : head_dim; }
  std::int64_t gqa_ratio() const { return num_q_heads / num_kv_heads; }
  std::int64_t rows() const { return max_seqs * max_q_len * num_q_heads; }
  std::int64_t m_bytes() const { return rows() * 4; }
  std::int64_t l_bytes() const { return rows() * 4; }
  std::int64_t o_bytes() const { return rows() * value_dim() * 4; }
  std::int64_t output_bytes() const { return rows() * value_dim() * 2; }  ///< a 16-bit output
  std::int64_t state_bytes() const { return m_bytes() + l_bytes() + o_bytes(); }

  /// Strides of a paged pool [num_blocks, block_size, num_kv_heads, head_dim].
  PoolStrides paged_strides() const;
  /// Strides of K (or V) in a scratch pool [slot, K|V, num_kv_heads, block_size, head_dim].
  PoolStrides scratch_pool_strides() const;
};

/// A copy of the running state of some sequences; can be kept, moved, merged and made into a
/// result. m, l: [num_seqs, num_q_heads] float32 (with q_len > 1: [num_seqs, q_len, num_q_heads]);
/// o: [..., head_dim_v].
class TILEDATTN_API State {
 public:
  /// An empty state: (-inf, 0, 0) everywhere.
  static State empty(Device device, std::int64_t num_seqs, std::int64_t q_len,
                     std::int64_t num_q_heads, std::int64_t head_dim_v, Stream stream = {});
  /// The same buffers with undefined contents, for a caller that fills them on `stream`.
  static State uninitialized(Device device, std::int64_t num_seqs, std::int64_t q_len,
                             std::int64_t num_q_heads, std::int64_t head_dim_v, Stream stream = {});

  Device device() const { return buffer_.device(); }
  std::int64_t num_seqs() const { return num_seqs_; }
  std::int64_t q_len() const { return q_len_; }
  std::int64_t num_q_heads() const { return num_q_heads_; }
  std::int64_t head_dim_v() const { return head_dim_v_; }
  Tensor m() const;
  Tensor l() const;
  Tensor o() const;
  const Buffer& buffer() const { return buffer_; }  ///< m, then l, then o, back to back
  /// The stream that last wrote this state; other streams are ordered after it.
  Stream stream() const { return stream_; }

  /// A copy on another device. Waits for the copy where either side is host memory.
  State to(Device device) const;
  /// Write o / l and m + ln l. `sinks` is [num_q_heads] float32 on the state's device. `out` is
  /// shaped like o, `lse` like m. Launches on the state's own stream unless one is given.
  void finalize(const Tensor& out, const std::optional<Tensor>& lse = {},
                const std::optional<Tensor>& sinks = {}, std::optional<Stream> stream = {}) const;

 private:
  State(Device device, std::int64_t num_seqs, std::int64_t q_len, std::int64_t num_q_heads,
        std::int64_t head_dim_v, Stream stream);

  Buffer buffer_;
  std::int64_t num_seqs_, q_len_, num_q_heads_, head_dim_v_;
  Stream stream_;
};

/// The KV blocks of one tile.
struct TileArgs {
  Tensor q;                  ///< [B, num_q_heads, head_dim] or [B, q_len, num_q_heads, head_dim]
  Tensor k_pool;             ///< [num_blocks, block_size, num_kv_heads, head_dim]; the type of q,
                             ///< float8_e4m3fn or int8
  Tensor v_pool;             ///< [num_blocks, block_size, num_kv_heads, head_dim_v]; as k_pool
  Tensor tile_blocks;        ///< [B, T'] int32 or int64: block ids, in the order of the sequence
  Tensor tile_block_counts;  ///< [B]: how many entries of a row are used
  std::optional<Tensor> last_block_valid_slots;  ///< [B]: slots of the last used block that count
  std::optional<std::int64_t> last_block_valid_slots_all;  ///< the same number for every sequence
  std::optional<Tensor> kv_positions;  ///< [B]: position of the tile's first slot
  std::optional<Tensor> q_positions;   ///< [B]: position of the first query token
  std::optional<KvScale> k_scale;      ///< of quantised pools; float8: nothing means 1
  std::optional<KvScale> v_scale;
  std::optional<Tensor> out;  ///< given: the last tile; finalize in the same call
  std::optional<Tensor> lse;  ///< with out
  bool early_start = false;   ///< as in PagedArgs; the keys that are seen of the tile
};

/// Attention over a KV cache visited tile by tile; the running softmax state stays in this object's
/// buffers. Online softmax: Milakov and Gimelshein 2018 (arXiv:1805.02867); tiles: Dao et al. 2022
/// (arXiv:2205.14135).
class TILEDATTN_API TiledAttention {
 public:
  explicit TiledAttention(const TiledAttentionDims& dims, Device device = default_device(),
                          const ScoreOptions& options = {});
  ~TiledAttention();
  TiledAttention(TiledAttention&&) noexcept;
  TiledAttention& operator=(TiledAttention&&) noexcept;

  /// Start a step over `num_seqs` sequences (0..max_seqs) with an empty state. Costs no launch:
  /// takes effect with the next call that touches the state. `stream` matters only for the capture
  /// rule: a step lies inside one capture or outside all.
  void begin_step(std::int64_t num_seqs, std::optional<Stream> stream = {});
  /// Fold one tile of KV blocks into the state. `check` waits and throws what the device found.
  void step_tile(const TileArgs& tile, Stream stream = {}, bool check = false);
  /// Fold tiles in this order: the bits of as many calls of step_tile. All of them are checked
  /// before the first is folded, and the threads of a CPU meet only at the end of the last one.
  void step_tiles(const std::vector<TileArgs>& tiles, Stream stream = {});
  /// Write o / l to `out` and m + ln l to `lse` ([B, Hq, Dv] or [B, q_len, Hq, Dv]). The state is
  /// unchanged. Without a stream it goes to step_stream().
  void finalize(const Tensor& out, const std::optional<Tensor>& lse = {},
                std::optional<Stream> stream = {});

  const TiledAttentionDims& dims() const;
  Device device() const;
  std::int64_t num_seqs() const;
  /// Query tokens of each sequence in this step; 0 before the step's first tile.
  std::int64_t q_len() const;
  /// Element type of q in this step, nothing before the step's first tile.
  std::optional<DType> dtype() const;
  /// Stream of the last call.
  Stream stream() const;
  /// Where finalize goes without a stream: that of the step's last step_tile, else of the last
  /// call.
  Stream step_stream() const;
  /// Bytes of all buffers of this object.
  std::int64_t nbytes() const;

  /// The object's own buffers, ordered after the last call on `stream()`: [max_seqs, Hq] or
  /// [max_seqs, max_q_len, Hq].
  Tensor m();
  Tensor l();
  Tensor o();
  /// What keeps the buffers alive when a view outlives the object.
  const Buffer& state_buffer() const;

  /// A copy of the first num_seqs sequences' state. This and load_state go to the stream of the
  /// last call unless one is given; later calls on other streams are ordered after them.
  State state(std::optional<Stream> stream = {});
  /// Start a step over state.num_seqs() sequences from this state.
  void load_state(const State& state, std::optional<Stream> stream = {});

  /// Wait for the last call and throw what the device found in block ids, counts, slots or
  /// positions. ValueError in a graph capture, which cannot wait.
  void check();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tiledattn
