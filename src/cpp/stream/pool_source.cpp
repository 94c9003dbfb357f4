// SPDX-License-Identifier: Apache-2.0
// PoolSource: KV blocks in arrays. Finds out how blocks lie in memory, pins it, counts leases.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "backend.h"
#include "check_quantized.h"
#include "check_tensor.h"
#include "stream/block_leases.h"
#include "stream/block_runs.h"
#include "tiledattn/tile_source.h"
#include "tiledattn/workspace.h"

namespace tiledattn {

namespace {

constexpr std::int64_t kPage = 4096;
/// Drivers refuse to pin very large ranges at once, but take them in pieces.
constexpr std::int64_t kPinnedPiece = std::int64_t{1} << 30;

void check_pool(const char* argument, const Tensor& pool) {
  check_rank(argument, pool, 4, "[num_blocks, block_size, num_kv_heads, head_dim]");
  check_cache_dtype(argument, pool);
  check_layout(argument, pool);
  if (pool.size() == 0)
    refuse(argument, "shape " + shape_to_string(pool), "one block of one element or more");
  for (int i = 0; i < 3; ++i) {
    if (pool.strides[i] < 0 && pool.shape[i] > 1)
      refuse(argument, "a negative stride in dimension " + std::to_string(i),
             "strides of 0 or more");
  }
}

/// Elements from the first to the end of the last one of a block.
std::int64_t block_span(const Tensor& pool) {
  std::int64_t span = pool.shape[3];
  for (int i = 1; i < 3; ++i) span += (pool.shape[i] - 1) * pool.strides[i];
  return span;
}

void check_runs(const char* argument, const Tensor& pool) {
  if (pool.shape[0] == 1 || pool.strides[0] >= block_span(pool)) return;
  throw ValueError(std::string(argument) + ": blocks are " + std::to_string(pool.strides[0]) +
                   " elements apart, but each spans " + std::to_string(block_span(pool)) +
                   "; a block must be one run of memory");
}

BlockPart part_of(const Tensor& pool) { return {0, 0, pool.strides[1], pool.strides[2]}; }

/// One plane where K and V of a block lie beside each other, else two.
TileGeometry geometry_of(const Tensor& k, const Tensor& v, const TileScales& scales) {
  check_pool("k_pool", k);
  check_pool("v_pool", v);
  check_same_dtype("v_pool", v, k.dtype, "k_pool");
  check_device("v_pool", v, k.device, "k_pool");
  check_shape("v_pool", v,
              {{"num_blocks", k.shape[0]},
               {"block_size", k.shape[1]},
               {"num_kv_heads", k.shape[2]},
               {"head_dim_v", kAnySize}});
  check_head_dim("k_pool", k.shape[3]);
  check_head_dim("v_pool", v.shape[3]);
  check_runs("k_pool", k);
  check_runs("v_pool", v);
  check_scale("k_scale", scales.k, k, "");
  check_scale("v_scale", scales.v, v, "");
  const std::int64_t item = item_bytes(k.dtype);
  TileGeometry g;
  g.sizes = {k.shape[0], k.shape[1], k.shape[2], k.shape[3], v.shape[3], k.dtype, scales};
  g.k = part_of(k);
  g.v = part_of(v);
  const auto k_at = reinterpret_cast<std::intptr_t>(k.data);
  const auto v_at = reinterpret_cast<std::intptr_t>(v.data);
  const std::int64_t distance = (v_at - k_at) / item;  // elements
  const std::int64_t first = std::min<std::int64_t>(distance, 0);
  const std::int64_t end = std::max(block_span(k), distance + block_span(v));
  const bool same_grid = k.strides[0] == v.strides[0] && (v_at - k_at) % item == 0;
  if (k.shape[0] > 1 && same_grid && end - first <= k.strides[0]) {
    g.k.offset = -first;
    g.v.offset = distance - first;
    g.plane_bytes[0] = k.strides[0] * item;
    return g;
  }
  g.v.plane = 1;
  g.plane_bytes[0] = (k.shape[0] > 1 ? k.strides[0] : block_span(k)) * item;
  g.plane_bytes[1] = (v.shape[0] > 1 ? v.strides[0] : block_span(v)) * item;
  return g;
}

/// Whole pages.
struct PageRange {
  std::uintptr_t begin, end;
};

struct PinnedPiece {
  PageRange pages;
  std::shared_ptr<void> registration;
};

}  // namespace

struct PoolSource::Impl {
  Impl(const Tensor& k, const Tensor& v, std::shared_ptr<void> keep, std::string called, bool pins,
       const TileScales& scales)
      : pools{k, v},
        geometry(geometry_of(k, v, scales)),
        owner(std::move(keep)),
        name(std::move(called)),
        wants_pinned(pins),
        leases(std::make_shared<BlockLeases>(k.shape[0])) {}

  /// The whole pages of each plane: what is on a page at an edge may belong to somebody else, who
  /// may have pinned it. Planes that follow each other are one range.
  std::vector<PageRange> page_ranges() const {
    std::vector<PageRange> ranges;
    for (int p = 0; p < geometry.num_planes(); ++p) {
      const auto begin = reinterpret_cast<std::uintptr_t>(plane_data(pools, geometry, p));
      const std::int64_t bytes =
          (geometry.sizes.num_blocks - 1) * geometry.plane_bytes[p] + used_bytes(geometry, p);
      const std::uintptr_t end = begin + static_cast<std::uintptr_t>(bytes);
      ranges.push_back({(begin + kPage - 1) / kPage * kPage, end / kPage * kPage});
    }
    if (ranges.size() == 2 && ranges[0].begin <= ranges[1].end &&
        ranges[1].begin <= ranges[0].end) {
      ranges = {
          {std::min(ranges[0].begin, ranges[1].begin), std::max(ranges[0].end, ranges[1].end)}};
    }
    return ranges;
  }

  void pin_pages(const Backend& backend) {
    std::vector<PinnedPiece> made;
    for (const PageRange& range : page_ranges()) {
      for (std::uintptr_t at = range.begin; at < range.end;) {
        const std::uintptr_t end = std::min<std::uintptr_t>(at + kPinnedPiece, range.end);
        made.push_back(
            {{at, end},
             backend.pin_host(reinterpret_cast<void*>(at), static_cast<std::int64_t>(end - at))});
        at = end;
      }
    }
    std::sort(made.begin(), made.end(),
              [](const auto& a, const auto& b) { return a.pages.begin < b.pages.begin; });
    pinned_pieces = std::move(made);
    pinned = true;
  }

  TilePools pools;
  TileGeometry geometry;
  std::shared_ptr<void> owner;
  std::string name;
  bool wants_pinned;
  std::shared_ptr<BlockLeases> leases;

  std::mutex pin_mutex;
  std::atomic<bool> pinned = false;
  std::vector<PinnedPiece> pinned_pieces;  // in order; constant once `pinned`
};

PoolSource::PoolSource(const Tensor& k_pool, const Tensor& v_pool, std::shared_ptr<void> owner,
                       std::string name, bool pin, const TileScales& scales)
    : impl_(
          std::make_unique<Impl>(k_pool, v_pool, std::move(owner), std::move(name), pin, scales)) {}

std::shared_ptr<PoolSource> PoolSource::allocate(const TileSizes& sizes, BlockLayout layout,
                                                 std::string name, bool pin) {
  const TileGeometry geometry = TileGeometry::packed(sizes, layout);
  const double bytes =
      static_cast<double>(sizes.num_blocks) * static_cast<double>(geometry.block_bytes());
  if (bytes > 4e18) refuse("num_blocks", std::to_string(sizes.num_blocks), "less than 4e18 bytes");
  const Device cpu;
  const Buffer buffer(cpu, sizes.num_blocks * geometry.block_bytes());
  char* const planes[2] = {static_cast<char*>(buffer.data()), nullptr};
  const TilePools pools = pools_at(geometry, planes, sizes.num_blocks, cpu);
  return std::make_shared<PoolSource>(pools.k, pools.v, buffer.owner(), std::move(name), pin,
                                      sizes.scales);
}

PoolSource::~PoolSource() = default;

std::string PoolSource::name() const { return impl_->name; }
TileGeometry PoolSource::describe() const { return impl_->geometry; }
std::optional<TilePools> PoolSource::pools() const { return impl_->pools; }
const std::shared_ptr<void>& PoolSource::owner() const { return impl_->owner; }

Residency PoolSource::residency() const {
  if (!impl_->pools.k.device.is_cpu()) return Residency::device;
  return impl_->pinned ? Residency::pinned : Residency::host;
}

void PoolSource::prepare(Device device) {
  if (device.is_cpu() || !impl_->pools.k.device.is_cpu() || !impl_->wants_pinned) return;
  const std::lock_guard<std::mutex> lock(impl_->pin_mutex);
  if (!impl_->pinned) impl_->pin_pages(backend_for(device));
}

Lease PoolSource::pin(const std::int64_t* blocks, std::int64_t count) {
  struct Held {
    std::shared_ptr<BlockLeases> leases;
    std::vector<std::int64_t> blocks;
    bool pinned = false;
    ~Held() {
      if (pinned) leases->unpin(blocks.data(), static_cast<std::int64_t>(blocks.size()));
    }
  };
  auto held = std::make_shared<Held>();
  held->leases = impl_->leases;
  held->blocks.assign(blocks, blocks + count);
  impl_->leases->pin(blocks, count);
  held->pinned = true;
  return held;
}

SourceRun PoolSource::run_at(const void* address) const {
  if (!impl_->pools.k.device.is_cpu()) return {nullptr, true};
  if (!impl_->pinned) return {};
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  for (const PinnedPiece& piece : impl_->pinned_pieces) {
    if (at < piece.pages.begin) return {reinterpret_cast<const void*>(piece.pages.begin), false};
    if (at < piece.pages.end) return {reinterpret_cast<const void*>(piece.pages.end), true};
  }
  return {};
}

std::vector<std::int64_t> PoolSource::evict(const std::int64_t* blocks, std::int64_t count) {
  return impl_->leases->evict(blocks, count);
}

void PoolSource::restore(const std::int64_t* blocks, std::int64_t count) {
  impl_->leases->restore(blocks, count);
}

}  // namespace tiledattn
