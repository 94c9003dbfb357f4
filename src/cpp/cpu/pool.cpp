// SPDX-License-Identifier: Apache-2.0
#include "cpu/pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>

#include "check_tensor.h"
#include "cpu/num_cpus.h"
#include "tiledattn/one_shot.h"

namespace tiledattn::cpu {
namespace {

constexpr int kMaxThreads = 1024;

/// What set_num_threads asked for; 0: nothing yet.
std::atomic<int> requested_threads{0};

/// `number` where the pool can have that many threads. `got`: as the caller wrote it.
int checked_num_threads(const char* argument, const std::string& got, std::int64_t number) {
  if (number < 1 || number > kMaxThreads) {
    refuse(argument, got, "1 to " + std::to_string(kMaxThreads));
  }
  return static_cast<int>(number);
}

int threads_from_environment() {
  const char* text = std::getenv("TILEDATTN_NUM_THREADS");
  if (text == nullptr || *text == '\0') return std::clamp(num_usable_cpus(), 1, kMaxThreads);
  char* end = nullptr;
  const long number = std::strtol(text, &end, 10);
  return checked_num_threads("TILEDATTN_NUM_THREADS", '"' + std::string(text) + '"',
                             *end == '\0' ? number : 0);
}

/// True on a thread that is running a task: its own calls run on itself.
thread_local bool in_task = false;

/// The tasks of one call.
class Job {
 public:
  Job(std::int64_t num_tasks, TaskRef task) : num_tasks_(num_tasks), task_(task) {}

  /// Runs tasks until there are none left.
  void work() {
    in_task = true;
    try {
      for (std::int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < num_tasks_;)
        task_(i);
    } catch (...) {
      next_.store(num_tasks_, std::memory_order_relaxed);
      const std::lock_guard lock(error_mutex_);
      if (!error_) error_ = std::current_exception();
    }
    in_task = false;
  }

  /// After all threads have left work().
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  const std::int64_t num_tasks_;
  const TaskRef task_;
  std::atomic<std::int64_t> next_{0};
  std::mutex error_mutex_;
  std::exception_ptr error_;
};

/// Workers, started when first needed. Never destroyed: they sleep until the process ends.
class Pool {
 public:
  /// False, with nothing done, when another call has the workers.
  bool run(Job& job, int num_helpers) {
    const std::unique_lock busy(busy_, std::try_to_lock);
    if (!busy.owns_lock()) return false;
    start_workers(num_helpers);
    {
      const std::lock_guard lock(mutex_);
      job_ = &job;
      places_ = num_helpers;
    }
    for (int i = 0; i < std::min(num_helpers, num_workers_); ++i) wake_.notify_one();
    job.work();
    std::unique_lock lock(mutex_);
    job_ = nullptr;  // a worker that wakes only now finds nothing
    left_.wait(lock, [this] { return working_ == 0; });
    return true;
  }

 private:
  void start_workers(int wanted) {
    try {
      for (; num_workers_ < wanted; ++num_workers_) std::thread(&Pool::serve, this).detach();
    } catch (const std::system_error&) {
      // The system gives no more threads: the work is done by fewer.
    }
  }

  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return job_ != nullptr && places_ > 0; });
      Job* const job = job_;
      --places_;
      ++working_;
      lock.unlock();
      job->work();
      lock.lock();
      // Done with this job: there is nothing left of it for anyone.
      places_ = 0;
      if (--working_ == 0) left_.notify_one();
    }
  }

  std::mutex busy_;      // held by the call that has the workers
  int num_workers_ = 0;  // guarded by busy_
  std::mutex mutex_;     // guards all below
  std::condition_variable wake_;
  std::condition_variable left_;
  Job* job_ = nullptr;
  int places_ = 0;   // workers that may still join the job
  int working_ = 0;  // workers in the job
};

std::atomic<Pool*> the_pool{nullptr};

/// The child of a fork has none of the threads and perhaps locked mutexes: it makes a new pool when
/// it needs one.
void forget_pool() { the_pool.store(nullptr); }

Pool& pool() {
  if (Pool* existing = the_pool.load()) return *existing;
  [[maybe_unused]] static const int registered = pthread_atfork(nullptr, nullptr, forget_pool);
  auto fresh = std::make_unique<Pool>();
  Pool* expected = nullptr;
  if (the_pool.compare_exchange_strong(expected, fresh.get())) return *fresh.release();
  return *expected;
}

}  // namespace

void parallel_for(std::int64_t num_tasks, TaskRef task) {
  const auto helpers = static_cast<int>(std::min<std::int64_t>(num_tasks, get_num_threads())) - 1;
  Job job(num_tasks, task);
  if (in_task) {
    for (std::int64_t i = 0; i < num_tasks; ++i) task(i);
    return;
  }
  if (helpers < 1 || !pool().run(job, helpers)) job.work();
  job.rethrow();
}

}  // namespace tiledattn::cpu

namespace tiledattn {

void set_num_threads(std::int64_t num_threads) {
  const int checked =
      cpu::checked_num_threads("num_threads", std::to_string(num_threads), num_threads);
  cpu::requested_threads.store(checked, std::memory_order_relaxed);
}

int get_num_threads() {
  const int requested = cpu::requested_threads.load(std::memory_order_relaxed);
  if (requested > 0) return requested;
  static const int standard = cpu::threads_from_environment();
  return standard;
}

}  // namespace tiledattn
