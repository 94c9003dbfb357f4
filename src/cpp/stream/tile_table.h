// SPDX-License-Identifier: Apache-2.0
// The index arrays of one step_tile: block ids, counts, valid slots and positions.
#pragma once

#include <cstdint>
#include <memory>

#include "stream/stream_plan.h"
#include "tiledattn/attention.h"

namespace tiledattn {

/// Written on the host, read on the device; on the CPU both are the same memory. One set of arrays
/// for each round of a launch.
struct TileTable {
  /// After the block ids come counts, valid slots, positions of keys and of queries, [B] each.
  static constexpr std::int64_t kVectors = 4;

  std::shared_ptr<void> host;
  void* device = nullptr;
  std::int64_t num_seqs = 0;
  std::int64_t width = 0;
  std::int64_t num_rounds = 1;

  /// Bytes of a table of this size.
  static std::int64_t bytes(std::int64_t num_seqs, std::int64_t width);
  std::int64_t bytes() const { return num_rounds * bytes(num_seqs, width); }

  /// Write the tables of a launch. `wanted[i]` false: piece i is left out. `in_place`: ids are the
  /// source's own, else places in the scratch in the order of the pieces.
  void fill(const TileLaunch& launch, const StreamRequest& request, const std::vector<bool>& wanted,
            bool in_place, std::int64_t block_size);
  /// The arrays of a round as step_tile takes them.
  void give(TileArgs& args, std::int64_t round, Device where, bool positions) const;
};

}  // namespace tiledattn
