// SPDX-License-Identifier: Apache-2.0
// Sources, sequences and calls for tests of streaming.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "tiled_case.h"

namespace test {

/// The blocks of a cache, packed as a source that is read keeps them. Misbehaves when told to.
class ReadSource : public TileSource {
 public:
  enum class Fault { none, throws, short_read };

  ReadSource(const PagedCache& cache, DType dtype, BlockLayout layout = BlockLayout::hnd) {
    const TileSizes sizes{cache.k.shape[0], cache.k.shape[1], cache.k.shape[2],
                          cache.k.shape[3], cache.v.shape[3], dtype};
    geometry_ = TileGeometry::packed(sizes, layout);
    bytes_.resize(static_cast<std::size_t>(sizes.num_blocks * geometry_.block_bytes()));
    put(cache.k, geometry_.k);
    put(cache.v, geometry_.v);
  }

  std::string name() const override { return "bytes"; }
  TileGeometry describe() const override { return geometry_; }

  Lease pin(const std::int64_t*, std::int64_t count) override {
    pinned += count;
    return {this, [this, count](void*) { pinned -= count; }};
  }

  std::int64_t read(const TileRead& request) override {
    ++reads;
    if (pinned < request.count) ++unpinned_reads;
    std::this_thread::sleep_for(delay.load());
    for (std::int64_t i = 0; i < request.count; ++i) {
      if (request.blocks[i] == bad_block && fault == Fault::throws) throw Error("the disk is gone");
      if (request.blocks[i] == bad_block && fault == Fault::short_read) {
        return i * geometry_.block_bytes() + 5;
      }
      std::memcpy(static_cast<char*>(request.data) + i * geometry_.block_bytes(),
                  bytes_.data() + request.blocks[i] * geometry_.block_bytes(),
                  static_cast<std::size_t>(geometry_.block_bytes()));
    }
    return request.bytes;
  }

  std::atomic<Fault> fault = Fault::none;
  std::atomic<std::int64_t> bad_block = -1;
  std::atomic<std::chrono::milliseconds> delay = std::chrono::milliseconds(0);
  std::atomic<std::int64_t> reads = 0;
  std::atomic<std::int64_t> pinned = 0;
  std::atomic<std::int64_t> unpinned_reads = 0;

 private:
  void put(const Host& pool, const BlockPart& part) {
    const std::int64_t item = item_bytes(geometry_.sizes.dtype);
    std::int64_t position = 0;
    for (std::int64_t block = 0; block < pool.shape[0]; ++block) {
      for (std::int64_t token = 0; token < pool.shape[1]; ++token) {
        for (std::int64_t head = 0; head < pool.shape[2]; ++head) {
          for (std::int64_t d = 0; d < pool.shape[3]; ++d) {
            const std::int64_t at = block * geometry_.block_bytes() / item + part.offset +
                                    token * part.token_stride + head * part.kv_head_stride + d;
            store(bytes_.data(), at, geometry_.sizes.dtype, pool[position++]);
          }
        }
      }
    }
  }

  TileGeometry geometry_;
  std::vector<char> bytes_;
};

/// A case whose cache is in a source, and the same cache in pools on the device.
struct StreamSetup {
  Setup tiled;
  Case c;
  std::shared_ptr<TileSource> source;
  Array host_k, host_v;

  /// `kind`: "read", "host" (pools on the CPU) or "device" (pools where attention runs).
  StreamSetup(const Case& of, Device device, const std::string& kind) : tiled(of, device), c(of) {
    if (kind == "read") {
      source = std::make_shared<ReadSource>(tiled.cache, c.dtype);
      return;
    }
    const Device where = kind == "host" ? kCpu : device;
    host_k = Array(tiled.cache.k, c.dtype, where);
    host_v = Array(tiled.cache.v, c.dtype, where);
    source = std::make_shared<PoolSource>(host_k, host_v);
  }

  ReadSource& reads() const { return static_cast<ReadSource&>(*source); }

  StreamSequences sequences() const {
    StreamSequences all;
    for (std::size_t b = 0; b < tiled.cache.lengths.size(); ++b) {
      auto sequence = std::make_shared<StreamSequence>();
      sequence->length = tiled.cache.lengths[b];
      sequence->parts = {{source, tiled.cache.tables[b], 0}};
      all.push_back(sequence);
    }
    return all;
  }

  /// Scratch for three slots of `tiles` tiles.
  StreamOptions options(std::int64_t tiles = 1) const {
    StreamOptions options;
    options.scratch_bytes =
        3 * (tiles * c.tile * source->describe().block_bytes() + 512) / 256 * 256;
    options.poison_scratch = true;
    return options;
  }

  TiledAttentionDims dims() const {
    TiledAttentionDims dims = c.dims();
    dims.tile_capacity = c.tile;
    return dims;
  }

  StreamingAttention attention(const StreamOptions& options) {
    return StreamingAttention(dims(), tiled.attention.device(),
                              c.rules.options(tiled.attention.device(), tiled.sinks), options);
  }

  AttendArgs args(const Array& out, const Array& lse) const {
    AttendArgs args;
    args.q = tiled.q_array;
    args.sequences = sequences();
    if (c.positions) {
      for (std::size_t b = 0; b < tiled.cache.lengths.size(); ++b)
        args.q_positions.push_back(tiled.cache.q_position(b, c.q_len));
    } else if (c.q_len > 1) {
      // All slots are seen from far behind them.
      args.q_positions.assign(tiled.cache.lengths.size(), 1 << 20);
    }
    args.out = out;
    args.lse = lse;
    return args;
  }
};

}  // namespace test
