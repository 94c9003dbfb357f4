// SPDX-License-Identifier: Apache-2.0
// Where a tile of rows of packed q belongs: what row_tiles.cu has counted, read back.
#pragma once

#include <cstdint>

namespace tiledattn::cuda {

/// The sequence of the launch that holds a tile: the first with `ends[i]` > tile.
template <typename Index>
__device__ Index find_sequence(const std::int32_t* ends, Index count, Index tile) {
  Index low = 0;
  Index high = count;
  while (low < high) {
    const Index middle = (low + high) / 2;
    if (ends[middle] <= tile) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace tiledattn::cuda
