// SPDX-License-Identifier: Apache-2.0
// The threads that call TileSource::read, and what became of the requests of one launch.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "tiledattn/tile_source.h"

namespace tiledattn {

/// How one request ended.
struct ReadOutcome {
  std::optional<std::int64_t> bytes;  ///< nothing: `error` says why
  std::exception_ptr error;
};

/// Requests that are waited for together. Each completes exactly once.
class ReadBatch {
 public:
  explicit ReadBatch(std::size_t num_reads) : outcomes_(num_reads), left_(num_reads) {}

  void complete(std::size_t index, ReadOutcome outcome, double seconds);
  bool done() const;
  /// Waits at most so long; true when all are complete.
  bool wait_for(std::chrono::milliseconds time) const;
  void wait() const;
  /// Only once done.
  const std::vector<ReadOutcome>& outcomes() const { return outcomes_; }
  double seconds() const { return seconds_; }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable all_done_;
  std::vector<ReadOutcome> outcomes_;
  std::size_t left_;
  double seconds_ = 0;
};

/// A request and its source, which stays alive until it is answered.
struct ReadJob {
  std::shared_ptr<TileSource> source;
  std::vector<std::int64_t> blocks;
  void* data = nullptr;
  std::int64_t bytes = 0;
  std::shared_ptr<void> owner;
  std::shared_ptr<ReadBatch> batch;
  std::size_t index = 0;
};

/// Threads that start with the first request, and end when what was posted is done.
class ReadThreads {
 public:
  explicit ReadThreads(std::int64_t num_threads);
  ~ReadThreads();
  ReadThreads(const ReadThreads&) = delete;
  ReadThreads& operator=(const ReadThreads&) = delete;

  void post(ReadJob job);
  /// Requests that have not begun are never made. They complete without bytes.
  void withdraw();
  /// Is the caller one of these threads, inside a read()?
  bool includes_this_thread() const;

 private:
  struct Crew;  // the threads, and what they share

  /// The child of a fork has none of the threads, but perhaps what they had locked: it leaves the
  /// crew as it is, undestroyed, and starts its own.
  bool crew_is_here() const;

  std::int64_t num_threads_;
  std::unique_ptr<Crew> crew_;
};

}  // namespace tiledattn
