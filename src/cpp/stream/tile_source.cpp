// SPDX-License-Identifier: Apache-2.0
#include "tiledattn/tile_source.h"

#include <string>
#include <utility>

#include "check_quantized.h"
#include "check_tensor.h"

namespace tiledattn {

namespace {

void check_size(const char* name, std::int64_t size) {
  if (size < 1) refuse(name, std::to_string(size), "1 or more");
}

/// "2 blocks of 4096 bytes in all, got 17", or what went wrong instead.
std::string outcome(const TileError::Details& d) {
  if (d.got_bytes) {
    return "wanted " + std::to_string(d.wanted_bytes) + " bytes, got " +
           std::to_string(*d.got_bytes);
  }
  std::string text = "wanted " + std::to_string(d.wanted_bytes) + " bytes, got ";
  try {
    if (d.cause) std::rethrow_exception(d.cause);
    text += "nothing";
  } catch (const std::exception& error) {
    text += error.what();
  } catch (...) {
    text += "an error of unknown type";
  }
  return text;
}

std::string message(const TileError::Details& d) {
  return "source '" + d.source + "', tile of " + std::to_string(d.num_blocks) +
         " blocks at position " + std::to_string(d.position) + " of sequence " +
         std::to_string(d.sequence) + ": " + outcome(d);
}

}  // namespace

const char* to_string(Residency residency) {
  switch (residency) {
    case Residency::device:
      return "device";
    case Residency::pinned:
      return "pinned";
    case Residency::host:
      return "host";
    default:
      return "remote";
  }
}

TileGeometry TileGeometry::packed(const TileSizes& sizes, BlockLayout layout) {
  check_size("num_blocks", sizes.num_blocks);
  check_size("block_size", sizes.block_size);
  check_size("num_kv_heads", sizes.num_kv_heads);
  check_head_dim("head_dim", sizes.head_dim);
  TileGeometry g;
  g.sizes = sizes;
  g.sizes.head_dim_v = g.value_dim();
  check_head_dim("head_dim_v", g.sizes.head_dim_v);
  const double block = static_cast<double>(sizes.block_size) *
                       static_cast<double>(sizes.num_kv_heads) *
                       static_cast<double>(sizes.head_dim + g.sizes.head_dim_v);
  if (block > 1e18)
    refuse("block_size", std::to_string(sizes.block_size), "blocks of less than 1e18 elements");
  if (block * static_cast<double>(sizes.num_blocks) > 1e18) {
    refuse("num_blocks", std::to_string(sizes.num_blocks),
           "less than 1e18 elements in all blocks together");
  }
  const Tensor named =
      make_tensor(nullptr, sizes.dtype, {},
                  {sizes.num_blocks, sizes.block_size, sizes.num_kv_heads, sizes.head_dim});
  check_cache_dtype("dtype", named);
  check_scale("k_scale", sizes.scales.k, named, "");
  check_scale("v_scale", sizes.scales.v, named, "");
  const auto part = [&](std::int64_t dim, std::int64_t offset) {
    const bool heads_first = layout == BlockLayout::hnd;
    return BlockPart{0, offset, heads_first ? dim : sizes.num_kv_heads * dim,
                     heads_first ? sizes.block_size * dim : dim};
  };
  const std::int64_t rows = sizes.block_size * sizes.num_kv_heads;
  g.k = part(sizes.head_dim, 0);
  g.v = part(g.sizes.head_dim_v, rows * sizes.head_dim);
  g.plane_bytes[0] = rows * (sizes.head_dim + g.sizes.head_dim_v) * item_bytes(sizes.dtype);
  return g;
}

void TileSource::prepare(Device) {}
Lease TileSource::pin(const std::int64_t*, std::int64_t) { return nullptr; }
SourceRun TileSource::run_at(const void*) const { return {}; }

std::int64_t TileSource::read(const TileRead&) {
  throw ValueError("source '" + name() + "' has neither pools() nor read()");
}

TileError::TileError(Details details) : Error(message(details)), details_(std::move(details)) {}

}  // namespace tiledattn
