// SPDX-License-Identifier: Apache-2.0
#include "stream/read_threads.h"

#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <system_error>
#include <thread>
#include <utility>

#include "stream/stopwatch.h"

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

struct ReadThreads::Crew {
  void work();

  const pid_t process = getpid();
  std::mutex mutex;
  std::condition_variable posted;
  std::deque<ReadJob> jobs;  // no more than the launches of a ring have
  bool ending = false;
  std::vector<std::thread> threads;
};

namespace {
/// The crew that the thread belongs to.
thread_local const void* crew_of_thread = nullptr;
}  // namespace

ReadThreads::ReadThreads(std::int64_t num_threads)
    : num_threads_(num_threads), crew_(std::make_unique<Crew>()) {}

ReadThreads::~ReadThreads() {
  if (!crew_is_here()) {
    static_cast<void>(crew_.release());
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(crew_->mutex);
    crew_->ending = true;
  }
  crew_->posted.notify_all();
  for (std::thread& thread : crew_->threads) thread.join();
}

bool ReadThreads::includes_this_thread() const { return crew_of_thread == crew_.get(); }

bool ReadThreads::crew_is_here() const { return crew_->process == getpid(); }

void ReadThreads::post(ReadJob job) {
  if (!crew_is_here()) {
    auto fresh = std::make_unique<Crew>();
    static_cast<void>(crew_.release());
    crew_ = std::move(fresh);
  }
  Crew& crew = *crew_;
  {
    const std::lock_guard<std::mutex> lock(crew.mutex);
    while (static_cast<std::int64_t>(crew.threads.size()) < num_threads_) {
      try {
        crew.threads.emplace_back([&crew] { crew.work(); });
      } catch (const std::system_error&) {  // those that the system allows have to do
        if (crew.threads.empty()) throw;
        break;
      }
    }
    crew.jobs.push_back(std::move(job));
  }
  crew.posted.notify_one();
}

void ReadThreads::withdraw() {
  if (!crew_is_here()) return;
  std::deque<ReadJob> withdrawn;
  {
    const std::lock_guard<std::mutex> lock(crew_->mutex);
    withdrawn.swap(crew_->jobs);
  }
  for (ReadJob& job : withdrawn) {
    job.source.reset();
    job.batch->complete(job.index, {}, 0);
  }
}

void ReadThreads::Crew::work() {
  crew_of_thread = this;
  for (;;) {
    ReadJob job;
    {
      std::unique_lock<std::mutex> lock(mutex);
      posted.wait(lock, [&] { return ending || !jobs.empty(); });
      if (jobs.empty()) return;
      job = std::move(jobs.front());
      jobs.pop_front();
    }
    const Stopwatch reading;
    ReadOutcome outcome;
    try {
      outcome.bytes =
          job.source->read({job.blocks.data(), static_cast<std::int64_t>(job.blocks.size()),
                            job.data, job.bytes, job.owner});
    } catch (...) {
      outcome.error = std::current_exception();
    }
    const double seconds = reading.seconds();
    // The source goes before anybody learns that the request is done.
    job.source.reset();
    job.batch->complete(job.index, std::move(outcome), seconds);
  }
}

}  // namespace tiledattn
