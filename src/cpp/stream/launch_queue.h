// SPDX-License-Identifier: Apache-2.0
// Which launch is fetched next: those of the call under way, then those of calls to come.
//
// Every launch that is begun has a slot of the fetcher's ring, in turn. A slot is used again when
// its launch is taken, that is folded or dropped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "stream/stream_plan.h"
#include "stream/tile_fetcher.h"
#include "tiledattn/streaming.h"

namespace tiledattn {

/// What one attend() fetches.
struct FetchJob {
  StreamRequest request;
  std::vector<TileLaunch> launches;
  std::size_t next = 0;  ///< the first launch that is not begun
  bool failed = false;   ///< a launch could not be begun ahead: its own attend() finds out why
};

class LaunchQueue {
 public:
  /// Counts in `stats` what is prefetched and dropped, and the time that it waits. Both are kept.
  LaunchQueue(TileFetcher& fetcher, StreamStats& stats) : fetcher_(fetcher), stats_(stats) {}

  /// Are there as many jobs as slots?
  bool full() const { return jobs_.size() >= fetcher_.slots().size(); }
  void add(std::shared_ptr<FetchJob> job) { jobs_.push_back(std::move(job)); }
  /// The first job, if it was prefetched for this request; else null.
  std::shared_ptr<FetchJob> prefetched(const StreamRequest& request) const;
  const std::deque<std::shared_ptr<FetchJob>>& jobs() const { return jobs_; }

  /// Begin launches while there are slots for them; the first one even if that means to wait.
  /// `ahead`: for calls to come only.
  void fill(bool wait_for_first, bool ahead);
  /// Is no launch begun that is not taken?
  bool empty() const { return begun_ == taken_; }
  /// The launch to be folded next.
  TileSlot& front() { return slot_of(taken_); }
  void take_front() { ++taken_; }
  /// The first job's launches are all taken. Waits until no source is read for them any more, and
  /// goes on with the next job meanwhile.
  void finish_first_job();
  /// Forget all jobs; what is under way for them is waited for.
  void drop_all();

 private:
  TileSlot& slot_of(std::int64_t launch);
  FetchJob* next_job() const;
  bool begin_launch(TileSlot& slot, FetchJob& job, bool ahead);

  TileFetcher& fetcher_;
  StreamStats& stats_;
  std::deque<std::shared_ptr<FetchJob>> jobs_;  // the one attended to, then what is prefetched
  std::int64_t begun_ = 0;  // launches that have got a slot, since the beginning
  std::int64_t taken_ = 0;  // of these, launches that are folded or dropped
};

}  // namespace tiledattn
