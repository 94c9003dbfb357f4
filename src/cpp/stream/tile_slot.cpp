// SPDX-License-Identifier: Apache-2.0
#include "stream/tile_slot.h"

#include "stream/block_runs.h"

namespace tiledattn {

namespace {

using AddCopy = std::function<void(const CopyPiece&)>;

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

void plane_places(const TileSlot& slot, const TileGeometry& geometry, char* planes[2]) {
  planes[0] = slot.scratch;
  planes[1] = slot.scratch + scratch_aligned(slot.launch->num_blocks * geometry.plane_bytes[0]);
}

void for_each_pool_copy(const TileSlot& slot, const AddCopy& add) {
  const TileSource& source = *slot.launch->source;
  const TilePools pools = *source.pools();
  const TileGeometry geometry = source.describe();
  char* planes[2];
  plane_places(slot, geometry, planes);
  std::int64_t place = 0;
  for (std::size_t i = 0; i < slot.launch->pieces.size(); ++i) {
    const std::int64_t count = slot.launch->pieces[i].count;
    for (int p = 0; p < geometry.num_planes() && !slot.failures[i]; ++p) {
      const std::int64_t block_bytes = geometry.plane_bytes[p];
      for_each_run({&source, plane_data(pools, geometry, p), planes[p] + place * block_bytes,
                    block_bytes, used_bytes(geometry, p), pools.k.device.is_cpu()},
                   slot.blocks(i), count, add);
    }
    place += count;
  }
}

/// Tiles that were read lie in the staging memory as they will in the scratch.
void for_each_staged_copy(const TileSlot& slot, const AddCopy& add) {
  const auto* const staging = static_cast<const char*>(slot.staging.get());
  std::int64_t offset = 0;
  CopyPiece run{nullptr, nullptr, 0, CopyFrom::pinned};
  for (std::size_t i = 0; i < slot.launch->pieces.size(); ++i) {
    const std::int64_t bytes = slot.piece_bytes(i);
    if (slot.failures[i]) {
      if (run.bytes > 0) add(run);
      run.bytes = 0;
    } else {
      if (run.bytes == 0) run.to = slot.scratch + offset, run.from = staging + offset;
      run.bytes += bytes;
    }
    offset += bytes;
  }
  if (run.bytes > 0) add(run);
}

}  // namespace

const KvPart& TileSlot::part(std::size_t piece) const {
  const TilePiece& p = launch->pieces[piece];
  return request->sequences[at(p.sequence)]->parts[at(p.part)];
}

const std::int64_t* TileSlot::blocks(std::size_t piece) const {
  return part(piece).blocks.data() + launch->pieces[piece].first;
}

std::int64_t TileSlot::piece_bytes(std::size_t piece) const {
  return launch->pieces[piece].count * launch->source->describe().block_bytes();
}

TilePools pools_of(const TileSlot& slot, Device device) {
  const TileSource& source = *slot.launch->source;
  if (slot.in_place) return *source.pools();
  const TileGeometry geometry = source.describe();
  char* planes[2];
  plane_places(slot, geometry, planes);
  return pools_at(geometry, planes, slot.launch->num_blocks, device);
}

void for_each_copy(const TileSlot& slot, const AddCopy& add) {
  if (slot.in_place) return;
  if (slot.launch->source->pools()) {
    for_each_pool_copy(slot, add);
  } else {
    for_each_staged_copy(slot, add);
  }
}

}  // namespace tiledattn
