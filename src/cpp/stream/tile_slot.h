// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "copy_queue.h"
#include "stream/read_threads.h"
#include "stream/stream_plan.h"
#include "stream/tile_table.h"
#include "tiledattn/streaming.h"

namespace tiledattn {

/// Scratch begins, and the planes in it, at multiples of so many bytes.
constexpr std::int64_t kScratchAlignment = 256;

constexpr std::int64_t scratch_aligned(std::int64_t bytes) {
  return (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
}

/// One place of the ring: scratch for the tiles of a launch, and what is under way there.
struct TileSlot {
  char* scratch = nullptr;
  std::shared_ptr<void> staging;  // host memory between a source that is read and the GPU
  TileTable table;
  std::unique_ptr<StreamEvent> copied, consumed;
  std::unique_ptr<StreamEvent> started, ended;  // of copies that are timed

  const TileLaunch* launch = nullptr;  // null: the slot is free
  const StreamRequest* request = nullptr;
  bool in_place = false;
  bool transferred = false;     // copies are on the queue
  bool table_on_queue = false;  // and the table, which is long, is among them
  bool timed = false;
  std::int64_t copied_bytes = 0;
  std::vector<Lease> leases;
  std::shared_ptr<ReadBatch> reads;
  std::vector<std::optional<TileError>> failures;  // for each piece

  const KvPart& part(std::size_t piece) const;
  const std::int64_t* blocks(std::size_t piece) const;
  std::int64_t piece_bytes(std::size_t piece) const;
};

/// Where the tiles of the slot's launch are attended to: in its scratch, or where the source has
/// them.
TilePools pools_of(const TileSlot& slot, Device device);

/// Call `add` with what brings the tiles of the slot's launch into its scratch.
void for_each_copy(const TileSlot& slot, const std::function<void(const CopyPiece&)>& add);

}  // namespace tiledattn
