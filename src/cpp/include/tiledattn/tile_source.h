// SPDX-License-Identifier: Apache-2.0
// Where KV blocks come from when they are not all in the memory that attention runs in.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tiledattn/error.h"
#include "tiledattn/tensor.h"

namespace tiledattn {

/// What quantised elements of a source are multiplied with: numbers > 0. float8_e4m3fn: nothing
/// means 1; int8 needs both.
struct TileScales {
  std::optional<double> k = {};
  std::optional<double> v = {};
};

/// The sizes of the blocks of a source.
struct TileSizes {
  std::int64_t num_blocks = 0;
  std::int64_t block_size = 0;  ///< tokens in a block
  std::int64_t num_kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t head_dim_v = 0;    ///< 0 means head_dim
  DType dtype = DType::bfloat16;  ///< that of q, float8_e4m3fn or int8
  TileScales scales = {};         ///< with a quantised dtype
};

/// Order inside K and inside V of a block: [block_size, num_kv_heads, head_dim] or heads before
/// tokens.
enum class BlockLayout : std::uint8_t { nhd, hnd };

/// Where K (or V) of a block lies. Strides and offset count elements.
struct BlockPart {
  int plane = 0;
  std::int64_t offset = 0;  ///< from the block's start in its plane
  std::int64_t token_stride = 0;
  std::int64_t kv_head_stride = 0;
};

/// How a source keeps its blocks: one run of bytes for each block in each of one or two planes. K
/// and V side by side are one plane, pools of their own are two.
struct TILEDATTN_API TileGeometry {
  TileSizes sizes;
  std::int64_t plane_bytes[2] = {0, 0};  ///< of one block, which is how far blocks are apart
  BlockPart k, v;

  int num_planes() const { return plane_bytes[1] > 0 ? 2 : 1; }
  std::int64_t block_bytes() const { return plane_bytes[0] + plane_bytes[1]; }
  std::int64_t value_dim() const { return sizes.head_dim_v ? sizes.head_dim_v : sizes.head_dim; }

  /// Blocks of K then V, without gaps. ValueError and TypeError name the size.
  static TileGeometry packed(const TileSizes& sizes, BlockLayout layout);
};

/// Where the bytes of a source are: in device memory, in host memory pinned by CUDA, in other host
/// memory, or anywhere else.
enum class Residency : std::uint8_t { device, pinned, host, remote };
constexpr int kNumResidencies = 4;

/// "device", "pinned", "host", "remote".
TILEDATTN_API const char* to_string(Residency residency);

/// One request to a source: `count` blocks, one after the other, into `bytes` bytes at `data`.
struct TileRead {
  const std::int64_t* blocks = nullptr;
  std::int64_t count = 0;
  void* data = nullptr;
  std::int64_t bytes = 0;
  std::shared_ptr<void> owner;  ///< keeps `data` alive
};

/// All blocks of a source as the arrays of TileArgs. May point to memory of any device.
struct TilePools {
  Tensor k;  ///< [num_blocks, block_size, num_kv_heads, head_dim]
  Tensor v;  ///< [num_blocks, block_size, num_kv_heads, head_dim_v]
};

/// Adjacent bytes of a source that one copy may move together.
struct SourceRun {
  const void* end = nullptr;  ///< where the run ends; null: no limit
  bool pinned = false;        ///< a GPU can copy them by itself
};

/// Keeps the blocks of one pin() in place while any copy of it lives.
using Lease = std::shared_ptr<void>;

/// KV blocks that a StreamingAttention fetches. A source whose memory can be addressed gives
/// pools(); any other one gives read(). Functions are called from several threads at once.
class TILEDATTN_API TileSource {
 public:
  virtual ~TileSource() = default;

  /// What errors call it.
  virtual std::string name() const = 0;
  /// Stays the same for the life of the source.
  virtual TileGeometry describe() const = 0;
  virtual Residency residency() const { return Residency::remote; }
  /// Two sources with one key are the same.
  virtual const void* key() const { return this; }

  /// Called once for each StreamingAttention that uses the source, before its first tile.
  virtual void prepare(Device device);
  /// No eviction of these blocks while the lease lives. Throws when one of them is not there. A
  /// CancelledError is no error of the tile: it ends the call.
  virtual Lease pin(const std::int64_t* blocks, std::int64_t count);
  /// All blocks, where their memory can be addressed.
  virtual std::optional<TilePools> pools() const { return std::nullopt; }
  /// The run of the pools' memory that holds `address`.
  virtual SourceRun run_at(const void* address) const;
  /// Fill the memory, with one plane's bytes for each block; return the number of bytes that were
  /// filled. Blocks the calling thread, which is one of the StreamingAttention's own: attend(),
  /// prefetch() and discard() of the same object throw ValueError there.
  virtual std::int64_t read(const TileRead& request);
};

/// KV blocks in arrays, in host memory or on a GPU. Attention on the device of the arrays reads
/// them in place. A GPU fetches from host memory, which is pinned at first use.
class TILEDATTN_API PoolSource : public TileSource {
 public:
  /// k_pool, v_pool: as in TileArgs; each block (of both, or of each) is one run of bytes. `owner`
  /// keeps their memory alive. `pin`: pin host memory for copies to a GPU, in pieces.
  PoolSource(const Tensor& k_pool, const Tensor& v_pool, std::shared_ptr<void> owner = {},
             std::string name = "pool", bool pin = true, const TileScales& scales = {});
  /// New host memory, on huge pages where the system has them, of undefined contents.
  static std::shared_ptr<PoolSource> allocate(const TileSizes& sizes, BlockLayout layout,
                                              std::string name = "pool", bool pin = true);
  ~PoolSource() override;

  std::string name() const override;
  TileGeometry describe() const override;
  Residency residency() const override;
  void prepare(Device device) override;
  Lease pin(const std::int64_t* blocks, std::int64_t count) override;
  std::optional<TilePools> pools() const override;
  SourceRun run_at(const void* address) const override;

  const std::shared_ptr<void>& owner() const;

  /// Take blocks out of use, but for those under a lease; returns the ones that were taken. Their
  /// memory is the caller's from then on, and attention to them is refused.
  std::vector<std::int64_t> evict(const std::int64_t* blocks, std::int64_t count);
  /// Put evicted blocks, with new contents, back into use.
  void restore(const std::int64_t* blocks, std::int64_t count);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// A tile that could not be had from its source. The state of the caller is unchanged.
class TILEDATTN_API TileError : public Error {
 public:
  struct Details {
    std::string source;
    std::int64_t sequence = 0;
    std::int64_t position = 0;  ///< of the tile's first key
    std::int64_t num_blocks = 0;
    std::int64_t wanted_bytes = 0;
    std::optional<std::int64_t> got_bytes;  ///< nothing: the source failed with an error
    std::exception_ptr cause;
  };
  explicit TileError(Details details);
  const Details& details() const { return details_; }

 private:
  Details details_;
};

/// A StreamingAttention's cancel(), or a source's pin(), ended this call.
class TILEDATTN_API CancelledError : public Error {
 public:
  using Error::Error;
};

}  // namespace tiledattn
