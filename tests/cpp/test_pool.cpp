// SPDX-License-Identifier: Apache-2.0
// Threads of the CPU backend: any number gives the same bits, callers may come at once, and a
// process may fork.
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "tiled_case.h"

using namespace tiledattn;
using namespace test;

// ThreadSanitizer refuses threads in a forked child, unless told that a test wants just that.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options();
const char* __tsan_default_options() { return "die_after_fork=0"; }

namespace {

/// Calls of each kind over inputs of their own.
struct Work {
  Case c{.name = "threads",
         .dtype = DType::bfloat16,
         .num_q_heads = 8,
         .num_kv_heads = 2,
         .head_dim = 64,
         .head_dim_v = 64,
         .block_size = 16,
         .tile = 20,
         .lengths = {700, 33, 1025, 480}};
  Setup tiled{c, kCpu};
  Host prefill_q = tiled.random.normal({2, 90, 8, 64});
  Host prefill_kv = tiled.random.normal({2, 90, 2, 64});

  std::vector<Host> run() {
    tiled.step();
    const Array out = tiled.out(DType::float32), lse = tiled.lse();
    tiled.attention.finalize(out, lse);
    std::vector<Host> results = {download(out), download(lse)};

    const Array table = tiled.cache.block_table(kCpu);
    const Array lengths = indices({4}, tiled.cache.lengths, kCpu);
    PagedArgs paged;
    paged.q = tiled.q_array;
    paged.k_pool = tiled.k_pool;
    paged.v_pool = tiled.v_pool;
    paged.block_table = table;
    paged.seq_lens = lengths;
    paged.out = out;
    paged_attention(paged);
    results.push_back(download(out));

    const Array q(prefill_q, DType::bfloat16, kCpu), kv(prefill_kv, DType::bfloat16, kCpu);
    const Array prefill_out(Host(prefill_q.shape), DType::bfloat16, kCpu);
    FlashArgs flash;
    flash.q = q;
    flash.k = flash.v = kv;
    flash.out = prefill_out;
    flash.causal = true;
    flash_attention(flash);
    results.push_back(download(prefill_out));
    return results;
  }
};

/// Puts the number of threads back.
struct ThreadCount {
  int before = get_num_threads();
  ~ThreadCount() { set_num_threads(before); }
};

}  // namespace

TEST(any_number_of_threads_gives_the_same_bits) {
  const ThreadCount restore;
  Work work;
  set_num_threads(1);
  CHECK(get_num_threads() == 1);
  const std::vector<Host> want = work.run();
  for (const float value : want[0].values) CHECK(std::isfinite(value));
  for (const int num_threads : {2, 5, 3, 1, 8}) {
    set_num_threads(num_threads);
    CHECK(get_num_threads() == num_threads);
    for (int round = 0; round < 3; ++round) CHECK(same_bits(want, work.run()));
  }
}

TEST(numbers_of_threads_that_no_pool_has_are_refused) {
  const ThreadCount restore;
  for (const std::int64_t number :
       {std::int64_t{0}, std::int64_t{-3}, std::int64_t{1025}, (std::int64_t{1} << 32) + 2}) {
    CHECK_THROWS(ValueError, set_num_threads(number), "num_threads",
                 "got " + std::to_string(number), "expected 1 to 1024");
    CHECK(get_num_threads() == restore.before);
  }
  set_num_threads(1024);
  CHECK(get_num_threads() == 1024);
}

TEST(callers_at_once_get_their_own_results) {
  const ThreadCount restore;
  const std::vector<Host> want = Work().run();
  for (const int num_threads : {1, 3}) {
    set_num_threads(num_threads);
    std::vector<std::vector<Host>> got(4);
    std::vector<std::thread> callers;
    for (std::vector<Host>& results : got) {
      callers.emplace_back([&results] {
        Work work;
        for (int round = 0; round < 4; ++round) results = work.run();
      });
    }
    for (std::thread& caller : callers) caller.join();
    for (const std::vector<Host>& results : got) CHECK(same_bits(want, results));
  }
}

TEST(one_object_used_by_two_threads_is_serialised) {
  Work work;
  work.tiled.step();
  const std::vector<Host> want = state_of(work.tiled.attention);
  const Array out = work.tiled.out(DType::float32);
  work.tiled.attention.finalize(out);
  const Host result = download(out);
  // finalize reads the state and does not change it, whoever calls.
  std::vector<Array> outs;
  for (int i = 0; i < 2; ++i) outs.push_back(work.tiled.out(DType::float32));
  std::vector<std::thread> callers;
  for (const Array& each : outs) {
    callers.emplace_back([&work, &each] {
      for (int round = 0; round < 50; ++round) work.tiled.attention.finalize(each);
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const Array& each : outs) CHECK(test::same_bits(result, download(each)));
  CHECK(same_bits(want, state_of(work.tiled.attention)));
}

TEST(callers_that_share_a_workspace_wait_for_each_other) {
  // Each caller has a query of its own: partial results of one in another's call would show. With
  // many threads for the work, the CPU splits sequences and so has partial results.
  const ThreadCount restore;
  set_num_threads(8);
  Work work;
  const Array table = work.tiled.cache.block_table(kCpu);
  const Array lengths = indices({4}, work.tiled.cache.lengths, kCpu);
  const auto call = [&](const Array& q, Workspace* workspace) {
    const Array out = work.tiled.out(DType::float32);
    PagedArgs args;
    args.q = q;
    args.k_pool = work.tiled.k_pool;
    args.v_pool = work.tiled.v_pool;
    args.block_table = table;
    args.seq_lens = lengths;
    args.out = out;
    args.workspace = workspace;
    paged_attention(args);
    return download(out);
  };
  Workspace shared(kCpu);
  std::vector<Array> queries;
  std::vector<Host> want;
  for (int i = 0; i < 3; ++i) {
    queries.emplace_back(work.tiled.random.normal(work.c.q_shape()), work.c.dtype, kCpu);
    want.push_back(call(queries.back(), nullptr));
  }
  int num_wrong[3] = {};
  std::vector<std::thread> callers;
  for (std::size_t i = 0; i < 3; ++i) {
    callers.emplace_back([&, i] {
      for (int round = 0; round < 40; ++round) {
        if (!test::same_bits(want[i], call(queries[i], &shared))) ++num_wrong[i];
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const int wrong : num_wrong) CHECK(wrong == 0);
}

TEST(an_error_in_one_caller_disturbs_no_other) {
  Work work;
  const std::vector<Host> want = work.run();
  std::thread failing([] {
    Work bad;
    bad.tiled.cache.tables[0][3] = 1 << 28;
    for (int round = 0; round < 20; ++round) {
      try {
        bad.run();
      } catch (const IndexError&) {
        continue;
      }
      std::abort();  // the bad block has to be found each time
    }
  });
  for (int round = 0; round < 5; ++round) CHECK(same_bits(want, work.run()));
  failing.join();
}

TEST(a_forked_child_can_work) {
  const ThreadCount restore;
  set_num_threads(3);
  Work work;
  const std::vector<Host> want = work.run();  // the pool's threads run now, and none in the child
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);  // a child that waits for threads it does not have must not hang the test
    _exit(same_bits(want, work.run()) ? 0 : 1);
  }
  CHECK(child > 0);
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(same_bits(want, work.run()));
}
