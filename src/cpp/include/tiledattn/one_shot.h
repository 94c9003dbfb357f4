// SPDX-License-Identifier: Apache-2.0
// Attention in one call: dense, packed and paged; merging of results; writing into a paged cache.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tiledattn/attention.h"
#include "tiledattn/options.h"
#include "tiledattn/tensor.h"
#include "tiledattn/workspace.h"

namespace tiledattn {

/// Order of the dimensions of q, k, v and out: [B, S, H, D], [B, H, S, D].
enum class Layout : std::uint8_t { bshd, bhsd };

struct FlashArgs {
  Tensor q;  ///< [B, Sq, Hq, D]; bhsd: [B, Hq, Sq, D]; packed: [total_q, Hq, D]
  Tensor k;  ///< [B, Sk, Hk, D]; bhsd: [B, Hk, Sk, D]; packed: [total_k, Hk, D]
  Tensor v;  ///< like k with Dv
  Tensor out;
  std::optional<Tensor> lse;  ///< out.shape[:-1] float32
  Layout layout = Layout::bshd;
  bool causal = false;  ///< aligned bottom-right: query i sees key j iff j <= i + Sk - Sq
  std::optional<Tensor> cu_seqlens_q;  ///< [B + 1] int32 or int64; both or none
  std::optional<Tensor> cu_seqlens_k;
  std::optional<std::int64_t> max_seqlen_q;  ///< hints
  std::optional<std::int64_t> max_seqlen_k;
  ScoreOptions score;
  bool check = false;              ///< wait and throw what the device found
  Workspace* workspace = nullptr;  ///< nothing: the device's own
};

struct PagedArgs {
  Tensor q;            ///< [B, Hq, D], [B, Sq, Hq, D], or [total_q, Hq, D] with cu_seqlens_q
  Tensor k_pool;       ///< [num_blocks, block_size, Hk, D]; the type of q, float8_e4m3fn or int8
  Tensor v_pool;       ///< [num_blocks, block_size, Hk, Dv]; as k_pool
  Tensor block_table;  ///< [B, max_blocks] int32 or int64
  Tensor seq_lens;     ///< [B] int32 or int64
  Tensor out;
  std::optional<Tensor> lse;
  std::optional<KvScale> k_scale;  ///< of quantised pools; float8: nothing means 1
  std::optional<KvScale> v_scale;
  bool causal = true;  ///< among the query tokens; the last one is at position seq_lens - 1
  std::optional<Tensor> cu_seqlens_q;  ///< [B + 1]
  std::optional<std::int64_t> max_seqlen_q;
  ScoreOptions score;
  /// The caller's word that all but q and the last Sq keys of each sequence was written before the
  /// kernel that runs before this call in its stream began. Decode on Hopper then reads the first
  /// keys while that kernel ends; elsewhere it changes nothing.
  bool early_start = false;
  bool check = false;
  Workspace* workspace = nullptr;
};

struct WriteKvArgs {
  Tensor k;             ///< [tokens, Hk, D]
  Tensor v;             ///< [tokens, Hk, Dv]
  Tensor k_pool;        ///< [num_blocks, block_size, Hk, D]; the type of k, float8_e4m3fn or int8
  Tensor v_pool;        ///< [num_blocks, block_size, Hk, Dv]; as k_pool
  Tensor slot_mapping;  ///< [tokens] int32 or int64: block * block_size + offset; negative skips
                        ///< the token
  std::optional<KvScale> k_scale;  ///< of quantised pools; float8: nothing means 1
  std::optional<KvScale> v_scale;
  bool check = false;
};

/// FlashAttention forward (Dao et al. 2022, arXiv:2205.14135).
TILEDATTN_API void flash_attention(const FlashArgs& args, Stream stream = {});
/// Attention over a paged KV cache (Kwon et al. 2023, arXiv:2309.06180).
TILEDATTN_API void paged_attention(const PagedArgs& args, Stream stream = {});
/// Combine two results over disjoint keys. lse_base: the base of the logarithm that both lse use,
/// in and out.
TILEDATTN_API void merge_attention(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                                   const Tensor& lse_b, const Tensor& out, const Tensor& lse,
                                   double lse_base, Stream stream = {});
/// Combine states over disjoint keys, in the order given. Launches on the first state's stream
/// unless one is given.
TILEDATTN_API State merge_states(const std::vector<const State*>& states,
                                 std::optional<Stream> stream = {});
/// Write tokens into the slots of a paged cache. Quantised pools hold value / scale, rounded to
/// nearest even and saturated; NaN stays NaN in float8 and becomes 0 in int8.
TILEDATTN_API void write_kv(const WriteKvArgs& args, Stream stream = {});

/// A question to `supports`: one kind of call with its sizes.
struct SupportQuery {
  enum class Operation : std::uint8_t { flash_attention, paged_attention, tiled_attention };
  Operation operation = Operation::flash_attention;
  Device device;
  DType dtype = DType::bfloat16;  ///< of q
  std::optional<DType> kv_dtype;  ///< of K and V; nothing means that of q
  std::int64_t num_q_heads = 1;
  std::int64_t num_kv_heads = 1;
  std::int64_t head_dim = 128;
  std::int64_t head_dim_v = 0;  ///< 0 means head_dim
  std::int64_t block_size = 16;
  /// Query tokens of a sequence; nothing means one, or many for flash_attention.
  std::optional<std::int64_t> q_len;
};

struct Support {
  bool supported = false;
  std::string kernel;  ///< the kernel that would run
  std::string reason;  ///< why not
};

/// Can this device run this, by which kernel, and if not why. Throws nothing but MemoryError.
TILEDATTN_API Support supports(const SupportQuery& query);

/// Wait for the device and throw what it found in the arguments of one-shot calls.
TILEDATTN_API void check(Device device);

/// Threads of the CPU backend, the caller's included. set: 1 to 1024.
TILEDATTN_API void set_num_threads(std::int64_t num_threads);
TILEDATTN_API int get_num_threads();

/// What the build holds and the machine offers.
struct BuildInfo {
  std::string version;
  std::string cuda;     ///< "13.0 for sm_80, sm_90a", or "" without CUDA
  std::string cpu_isa;  ///< the instruction set in use
  std::string no_cuda;  ///< why no GPU can be used; "" when one can
  int num_cuda_devices = 0;
};
TILEDATTN_API BuildInfo build_info();

}  // namespace tiledattn
