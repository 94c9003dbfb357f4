// SPDX-License-Identifier: Apache-2.0
// Calls of a StreamingAttention that cannot be waited for: from within its own calls, and in the
// child of a fork.
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include "stream_case.h"

using namespace tiledattn;
using namespace test;

// ThreadSanitizer refuses threads in a forked child, unless told that a test wants just that.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options();
const char* __tsan_default_options() { return "die_after_fork=0"; }

namespace {

Case small_case() {
  return {.name = "calls",
          .dtype = DType::float32,
          .num_q_heads = 4,
          .num_kv_heads = 2,
          .head_dim = 16,
          .head_dim_v = 16,
          .block_size = 4,
          .tile = 3,
          .lengths = {90, 41, 5}};
}

/// A source that does something else first.
class BusySource final : public ReadSource {
 public:
  using ReadSource::ReadSource;
  Lease pin(const std::int64_t* blocks, std::int64_t count) override {
    if (before_pin) before_pin();
    return ReadSource::pin(blocks, count);
  }
  std::int64_t read(const TileRead& request) override {
    if (before_read) before_read();
    return ReadSource::read(request);
  }
  std::function<void()> before_pin, before_read;
};

/// The calls of one object, and what they should give.
struct Calls {
  StreamSetup s{small_case(), kCpu, "read"};
  BusySource* source = nullptr;
  Array out = s.tiled.out(s.c.dtype), lse = s.tiled.lse();
  std::unique_ptr<StreamingAttention> streaming;
  std::vector<Host> want;

  Calls() {
    auto busy = std::make_shared<BusySource>(s.tiled.cache, s.c.dtype);
    source = busy.get();
    s.source = busy;
    streaming = another();
    want = results(*another());
  }

  std::unique_ptr<StreamingAttention> another() {
    return std::make_unique<StreamingAttention>(s.attention(s.options()));
  }
  std::vector<Host> results(StreamingAttention& of) {
    of.attend(s.args(out, lse));
    return {download(out), download(lse)};
  }
  bool right(StreamingAttention& of) { return same_bits(results(of), want); }
  /// ThreadSanitizer takes no new thread with the id of one that the child does not have.
  bool right_in_child(StreamingAttention& of) {
#if defined(__SANITIZE_THREAD__)
    static_cast<void>(of);
    return true;
#else
    return right(of);
#endif
  }
};

/// The message of the ValueError that `call` ends with.
std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const ValueError& error) {
    return error.what();
  }
  return "no refusal";
}

bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

/// Is `body` true in a child? One that waits for threads it does not have must not hang the test.
bool true_in_child(const std::function<bool()>& body) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    try {
      _exit(body() ? 0 : 1);
    } catch (...) {
      _exit(2);
    }
  }
  int status = -1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace

TEST(a_read_cannot_call_what_waits_for_it) {
  Calls c;
  std::mutex mutex;
  std::vector<std::string> messages;
  c.source->before_read = [&] {
    const std::lock_guard<std::mutex> lock(mutex);
    messages.push_back(refusal([&] { c.streaming->attend(c.s.args(c.out, c.lse)); }));
    messages.push_back(refusal([&] { c.streaming->prefetch(c.s.sequences()); }));
    messages.push_back(refusal([&] { c.streaming->discard(); }));
    c.streaming->stats();
    c.streaming->reset_stats();
  };
  CHECK(c.right(*c.streaming));
  CHECK(messages.size() >= 3);
  for (const std::string& message : messages)
    CHECK(has(message, "read() of a source that the same object waits for"));
}

TEST(a_read_can_call_another_object_and_cancel_its_own) {
  Calls c;
  const std::unique_ptr<StreamingAttention> other = c.another();
  const StreamSetup pools(small_case(), kCpu, "host");
  std::atomic<bool> same = true;
  c.source->before_read = [&] {
    const Array out = pools.tiled.out(pools.c.dtype), lse = pools.tiled.lse();
    other->attend(pools.args(out, lse));
    if (!same_bits(download(out), c.want[0])) same = false;
  };
  CHECK(c.right(*c.streaming));
  CHECK(same);
  c.source->before_read = [&] { c.streaming->cancel(); };
  CHECK_THROWS(CancelledError, c.results(*c.streaming), "cancelled");
  c.source->before_read = nullptr;
  CHECK(c.right(*c.streaming));
}

TEST(a_call_in_the_middle_of_a_call_is_refused) {
  Calls c;
  AttendArgs args = c.s.args(c.out, c.lse);
  for (int i = 0; i < 2; ++i) {
    args.poll = [&, i] {
      if (i == 0) c.streaming->discard();
      if (i == 1) c.streaming->attend(c.s.args(c.out, c.lse));
    };
    CHECK_THROWS(ValueError, c.streaming->attend(args), "in the middle of a call", "same thread");
  }
  c.source->before_pin = [&] { c.streaming->discard(); };
  CHECK_THROWS(TileError, c.results(*c.streaming), "in the middle of a call", "pin()");
  c.source->before_pin = nullptr;
  CHECK(c.right(*c.streaming));
}

TEST(the_last_reference_may_go_in_a_read) {
  Calls c;
  std::atomic<bool> gone = false;
  std::mutex mutex;
  c.source->before_read = [&] {
    const std::lock_guard<std::mutex> lock(mutex);
    if (gone) return;
    c.streaming.reset();
    gone = true;
  };
  {
    const std::lock_guard<std::mutex> lock(mutex);
    c.streaming->prefetch(c.s.sequences());
  }
  while (!gone || c.s.source.use_count() > 1) std::this_thread::yield();
  CHECK(c.right(*c.another()));
}

TEST(an_object_can_be_moved_over_another) {
  Calls c;
  c.right(*c.streaming);
  StreamingAttention moved = c.s.attention(c.s.options());
  moved.prefetch(c.s.sequences());
  moved = std::move(*c.streaming);
  CHECK(c.right(moved));
  CHECK(moved.stats().calls == 2);
}

TEST(a_forked_child_can_go_on) {
  Calls c;
  CHECK(c.right(*c.streaming));
  CHECK(true_in_child(
      [&] { return c.right_in_child(*c.streaming) && c.right_in_child(*c.streaming); }));
  CHECK(true_in_child([&] {
    c.streaming.reset();
    return true;
  }));
  CHECK(true_in_child([&] {
    const bool good = c.right_in_child(*c.streaming);
    c.streaming.reset();
    return good;
  }));
  CHECK(c.right(*c.streaming));
}

TEST(a_forked_child_does_not_wait_for_what_was_prefetched) {
  Calls c;
  c.source->delay = std::chrono::milliseconds(50);
  c.streaming->prefetch(c.s.sequences());
  CHECK(true_in_child([&] {
    c.streaming->discard();
    const bool good = c.right_in_child(*c.streaming);
    c.streaming.reset();
    return good;
  }));
  CHECK(true_in_child([&] {
    c.streaming.reset();
    return true;
  }));
  CHECK(c.right(*c.streaming));
  CHECK(c.streaming->stats().dropped_launches == 0);
}

TEST(a_forked_child_is_told_of_calls_that_will_not_end) {
  Calls c;
  c.source->delay = std::chrono::milliseconds(100);
  c.source->reads = 0;
  std::thread other([&] { c.right(*c.streaming); });
  while (c.source->reads == 0) std::this_thread::yield();
  CHECK(true_in_child([&] {
    c.streaming->discard();
    c.streaming->stats();
    c.streaming->reset_stats();
    const std::unique_ptr<StreamingAttention> mine = c.another();
    const std::string attend = refusal([&] { c.streaming->attend(c.s.args(c.out, c.lse)); });
    const std::string prefetch = refusal([&] { c.streaming->prefetch(c.s.sequences()); });
    const bool cancelled = c.streaming->cancel();
    c.streaming.reset();
    return has(attend, "forked in the middle of a call") && attend == prefetch && !cancelled &&
           c.right_in_child(*mine);
  }));
  other.join();
  CHECK(c.right(*c.streaming));
}

TEST(a_call_that_forks_ends_in_the_child) {
  Calls c;
  const pid_t parent = getpid();
  AttendArgs args = c.s.args(c.out, c.lse);
  c.source->delay = std::chrono::milliseconds(50);
  bool forked = false;
  pid_t child = -1;
  args.poll = [&] {
    if (forked) return;
    forked = true;
    std::fflush(nullptr);
    child = fork();
    if (child == 0) alarm(60);
  };
  std::string message;
  try {
    c.streaming->attend(args);
  } catch (const ValueError& error) {
    message = error.what();
  }
  if (getpid() != parent) {
    const bool good =
        has(message, "forked in the middle of a call") && c.right_in_child(*c.streaming);
    c.streaming.reset();
    _exit(good ? 0 : 1);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(message.empty());
  CHECK(c.right(*c.streaming));
}
