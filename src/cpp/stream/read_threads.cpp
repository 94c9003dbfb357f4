// SPDX-License-Identifier: Apache-2.0
#include "stream/read_threads.h"

#include <utility>

namespace tiledattn {

void ReadBatch::complete(std::size_t index, ReadOutcome outcome, double seconds) {
  const std::lock_guard<std::mutex> lock(mutex_);
  outcomes_[index] = std::move(outcome);
  seconds_ += seconds;
  // Under the lock: whoever waits may destroy the batch as soon as it sees that none is left.
  if (--left_ == 0) all_done_.notify_all();
}

bool ReadBatch::done() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return left_ == 0;
}

bool ReadBatch::wait_for(std::chrono::milliseconds time) const {
  std::unique_lock<std::mutex> lock(mutex_);
  return all_done_.wait_for(lock, time, [&] { return left_ == 0; });
}

void ReadBatch::wait() const {
  std::unique_lock<std::mutex> lock(mutex_);
  all_done_.wait(lock, [&] { return left_ == 0; });
}

ReadThreads::~ReadThreads() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
  }
  posted_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ReadThreads::post(ReadJob job) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    while (static_cast<std::int64_t>(threads_.size()) < num_threads_)
      threads_.emplace_back([this] { work(); });
    jobs_.push_back(std::move(job));
  }
  posted_.notify_one();
}

void ReadThreads::work() {
  for (;;) {
    ReadJob job;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      posted_.wait(lock, [&] { return ending_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    const auto begin = std::chrono::steady_clock::now();
    ReadOutcome outcome;
    try {
      outcome.bytes =
          job.source->read({job.blocks.data(), static_cast<std::int64_t>(job.blocks.size()),
                            job.data, job.bytes, job.owner});
    } catch (...) {
      outcome.error = std::current_exception();
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    // The source goes before anybody learns that the request is done.
    job.source.reset();
    job.batch->complete(job.index, std::move(outcome), took.count());
  }
}

}  // namespace tiledattn
