// SPDX-License-Identifier: Apache-2.0
// Blocks of a source as bytes: where they lie, and which of them one copy can move.
#pragma once

#include <cstdint>
#include <functional>

#include "copy_queue.h"
#include "tiledattn/tile_source.h"

namespace tiledattn {

/// Bytes of a block in a plane up to its last element; the rest of plane_bytes is a gap.
std::int64_t used_bytes(const TileGeometry& geometry, int plane);

/// The first byte of a plane of the pools that have this geometry.
char* plane_data(const TilePools& pools, const TileGeometry& geometry, int plane);

/// The pools of `count` blocks whose planes begin at these addresses.
TilePools pools_at(const TileGeometry& geometry, char* const planes[2], std::int64_t count,
                   Device device);

/// One plane of some blocks of a source, to be copied to adjacent places from `to` on.
struct PlaneCopy {
  const TileSource* source = nullptr;
  const char* from = nullptr;  ///< block 0 of the plane
  char* to = nullptr;
  std::int64_t block_bytes = 0;  ///< plane_bytes
  std::int64_t used_bytes = 0;
  bool on_host = true;  ///< `from` is host memory
};

/// Calls `add` with one copy for each run of neighbouring blocks, cut where the source's memory is.
void for_each_run(const PlaneCopy& plane, const std::int64_t* blocks, std::int64_t count,
                  const std::function<void(const CopyPiece&)>& add);

}  // namespace tiledattn
