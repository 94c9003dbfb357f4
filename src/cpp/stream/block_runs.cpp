// SPDX-License-Identifier: Apache-2.0
#include "stream/block_runs.h"

#include <algorithm>

namespace tiledattn {

namespace {

std::int64_t part_end(const TileGeometry& g, const BlockPart& part, std::int64_t dim) {
  return part.offset + (g.sizes.block_size - 1) * part.token_stride +
         (g.sizes.num_kv_heads - 1) * part.kv_head_stride + dim;
}

Tensor part_tensor(const TileGeometry& g, const BlockPart& part, std::int64_t dim,
                   char* const planes[2], std::int64_t count, Device device) {
  const std::int64_t item = item_bytes(g.sizes.dtype);
  Tensor tensor;
  tensor.data = planes[part.plane] + part.offset * item;
  tensor.dtype = g.sizes.dtype;
  tensor.device = device;
  tensor.rank = 4;
  const std::int64_t shape[4] = {count, g.sizes.block_size, g.sizes.num_kv_heads, dim};
  const std::int64_t strides[4] = {g.plane_bytes[part.plane] / item, part.token_stride,
                                   part.kv_head_stride, 1};
  std::copy(shape, shape + 4, tensor.shape);
  std::copy(strides, strides + 4, tensor.strides);
  return tensor;
}

CopyFrom memory_of(const PlaneCopy& plane, const SourceRun& run) {
  if (!plane.on_host) return CopyFrom::device;
  return run.pinned ? CopyFrom::pinned : CopyFrom::pageable;
}

/// The bytes from `from` on in copies that each stay inside one run of the source's memory.
void cut_run(const PlaneCopy& plane, const char* from, char* to, std::int64_t bytes,
             const std::function<void(const CopyPiece&)>& add) {
  while (bytes > 0) {
    const SourceRun run = plane.source->run_at(from);
    const auto* end = static_cast<const char*>(run.end);
    const std::int64_t here = end ? std::min<std::int64_t>(bytes, end - from) : bytes;
    add({to, from, here, memory_of(plane, run)});
    from += here;
    to += here;
    bytes -= here;
  }
}

}  // namespace

std::int64_t used_bytes(const TileGeometry& g, int plane) {
  std::int64_t end = 0;
  if (g.k.plane == plane) end = std::max(end, part_end(g, g.k, g.sizes.head_dim));
  if (g.v.plane == plane) end = std::max(end, part_end(g, g.v, g.value_dim()));
  return end * item_bytes(g.sizes.dtype);
}

char* plane_data(const TilePools& pools, const TileGeometry& g, int plane) {
  const bool of_k = g.k.plane == plane;
  const Tensor& tensor = of_k ? pools.k : pools.v;
  const std::int64_t offset = of_k ? g.k.offset : g.v.offset;
  return static_cast<char*>(tensor.data) - offset * item_bytes(g.sizes.dtype);
}

TilePools pools_at(const TileGeometry& g, char* const planes[2], std::int64_t count,
                   Device device) {
  return {part_tensor(g, g.k, g.sizes.head_dim, planes, count, device),
          part_tensor(g, g.v, g.value_dim(), planes, count, device)};
}

void for_each_run(const PlaneCopy& plane, const std::int64_t* blocks, std::int64_t count,
                  const std::function<void(const CopyPiece&)>& add) {
  for (std::int64_t first = 0; first < count;) {
    std::int64_t end = first + 1;
    while (end < count && blocks[end] == blocks[end - 1] + 1) ++end;
    cut_run(plane, plane.from + blocks[first] * plane.block_bytes,
            plane.to + first * plane.block_bytes,
            (end - first - 1) * plane.block_bytes + plane.used_bytes, add);
    first = end;
  }
}

}  // namespace tiledattn
