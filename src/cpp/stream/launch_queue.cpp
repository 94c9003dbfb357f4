// SPDX-License-Identifier: Apache-2.0
#include "stream/launch_queue.h"

#include <algorithm>

#include "stream/stopwatch.h"
#include "tiledattn/error.h"

namespace tiledattn {

std::shared_ptr<FetchJob> LaunchQueue::prefetched(const StreamRequest& request) const {
  if (jobs_.empty() || jobs_.front()->failed) return nullptr;
  return same_request(jobs_.front()->request, request) ? jobs_.front() : nullptr;
}

TileSlot& LaunchQueue::slot_of(std::int64_t launch) {
  std::vector<TileSlot>& slots = fetcher_.slots();
  return slots[static_cast<std::size_t>(launch) % slots.size()];
}

/// The first one that has a launch to be begun.
FetchJob* LaunchQueue::next_job() const {
  for (const auto& job : jobs_) {
    if (job->failed) return nullptr;
    if (job->next < job->launches.size()) return job.get();
  }
  return nullptr;
}

/// What goes wrong for a later call is not this call's error, unless it was to end this one.
bool LaunchQueue::begin_launch(TileSlot& slot, FetchJob& job, bool ahead) {
  try {
    fetcher_.begin(slot, job.launches[job.next], job.request);
    return true;
  } catch (const CancelledError&) {
    job.failed = true;
    throw;
  } catch (...) {
    if (!ahead && &job == jobs_.front().get()) throw;
    job.failed = true;
    return false;
  }
}

void LaunchQueue::fill(bool wait_for_first, bool ahead) {
  const Stopwatch waiting;
  const auto num_slots = static_cast<std::int64_t>(fetcher_.slots().size());
  for (std::int64_t i = taken_; i < begun_; ++i) fetcher_.advance(slot_of(i));
  while (begun_ - taken_ < num_slots) {
    FetchJob* const job = next_job();
    TileSlot& slot = slot_of(begun_);
    if (!job || (!wait_for_first && !fetcher_.reusable(slot))) break;
    wait_for_first = false;
    if (!begin_launch(slot, *job, ahead)) break;
    if (ahead || job != jobs_.front().get()) stats_.prefetched_launches += slot.launch->num_rounds;
    ++job->next;
    ++begun_;
  }
  if (!ahead) stats_.stall_seconds += waiting.seconds();
}

void LaunchQueue::finish_first_job() {
  const auto num_slots = static_cast<std::int64_t>(fetcher_.slots().size());
  const auto num_launches = static_cast<std::int64_t>(jobs_.front()->launches.size());
  const std::int64_t end = taken_;
  for (std::int64_t i = end - std::min(num_launches, num_slots); i < end; ++i) {
    const Stopwatch waiting;
    // The slot may have been given to the next job by now.
    if (begun_ <= i + num_slots) fetcher_.release(slot_of(i));
    stats_.stall_seconds += waiting.seconds();
    fill(false, false);
  }
  jobs_.pop_front();
}

void LaunchQueue::drop_all() {
  for (std::int64_t i = taken_; i < begun_; ++i)
    stats_.dropped_launches += slot_of(i).launch->num_rounds;
  fetcher_.drain();
  taken_ = begun_;
  jobs_.clear();
}

}  // namespace tiledattn
