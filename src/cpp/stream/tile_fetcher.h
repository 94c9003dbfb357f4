// SPDX-License-Identifier: Apache-2.0
// Brings the tiles of a launch to where attention can read them.
//
// A launch passes through one slot of a ring: begin() fetches, or asks the source to read;
// arrive() waits for the source and puts on the stream of attention the table of the launch and
// what makes it wait for the copies; consumed() marks the end of the kernel. Three orders keep
// slots from being overwritten, and there are no others:
//   copied     a kernel starts after the copies into its slot;
//   consumed   copies into a slot start after the kernel that read it;
//   reusable() host memory that copies read from, and leases, are given up after the copies.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "copy_queue.h"
#include "stream/read_threads.h"
#include "stream/stream_plan.h"
#include "stream/tile_slot.h"
#include "tiledattn/streaming.h"

namespace tiledattn {

class TileFetcher {
 public:
  /// `queue` copies to `device`.
  TileFetcher(const TiledAttentionDims& dims, Device device, const StreamOptions& options,
              std::unique_ptr<CopyQueue> queue);
  /// Waits for reads and copies.
  ~TileFetcher();

  /// Blocks that a launch can take from this source. ValueError where that is less than a tile.
  std::int64_t capacity(const TileSource& source) const;
  /// Is this source attended to where it lies?
  bool in_place(const TileSource& source) const;
  /// Refuses a source that cannot be fetched from, and makes it ready.
  void prepare(TileSource& source) const;

  /// Fetch, or begin to read, the tiles of a launch into a reusable slot.
  void begin(TileSlot& slot, const TileLaunch& launch, const StreamRequest& request);
  /// Begin the copies of a slot whose source is done, if it is.
  void advance(TileSlot& slot);
  /// Wait for the source, then order `stream` after the copies. `wait_for_reads` waits as it likes.
  void arrive(TileSlot& slot, const Stream& stream,
              const std::function<void(const ReadBatch&)>& wait_for_reads);
  /// The tile of a round as step_tile takes it, but for q.
  TileArgs tile(const TileSlot& slot, std::int64_t round, bool positions) const;
  /// The kernel that reads the slot is on `stream`.
  void consumed(TileSlot& slot, const Stream& stream);

  /// Can begin() use the slot without waiting?
  bool reusable(const TileSlot& slot) const;
  /// Wait until it can, and give up leases.
  void release(TileSlot& slot);
  /// Wait for all that is under way, wanted or not. Reads that have not begun are not made.
  void drain();
  /// In the child of a fork: nobody reads into the slot any more.
  void abandon_reads(TileSlot& slot) const;
  /// Is the caller inside a read() that was asked for here?
  bool in_read() const { return readers_.includes_this_thread(); }

  /// Is a source being read?
  bool reading() const;
  /// The leases and errors of all slots. Not while a source is being read.
  void add_kept(Prefetched& kept) const;

  std::vector<TileSlot>& slots() { return slots_; }
  const CopyQueue& queue() const { return *queue_; }
  /// Of what attention reads: scratch and tables.
  std::int64_t nbytes() const;

  /// Tiles, bytes and seconds since the last call.
  StreamStats take_stats();

 private:
  void begin_reads(TileSlot& slot);
  void transfer(TileSlot& slot);
  void put_on_queue(TileSlot& slot);
  void begin_copies(TileSlot& slot);
  void end_copies(TileSlot& slot);
  void count_copies(TileSlot& slot);
  void fill_table(TileSlot& slot);
  void collect_reads(TileSlot& slot);
  void fail(TileSlot& slot, std::size_t piece, std::optional<std::int64_t> got,
            std::exception_ptr cause);
  /// Is nothing being copied now?
  bool idle() const;

  TiledAttentionDims dims_;
  Device device_;
  StreamOptions options_;
  std::int64_t slot_bytes_, table_bytes_;  // of one slot
  Buffer scratch_, tables_;
  StreamStats stats_;
  std::unique_ptr<CopyQueue> queue_;
  std::vector<TileSlot> slots_;
  const StreamEvent* last_copied_ = nullptr;
  std::int64_t transfers_ = 0;
  double seconds_per_byte_ = 0;  // of the copies timed last
  ReadThreads readers_;
};

}  // namespace tiledattn
