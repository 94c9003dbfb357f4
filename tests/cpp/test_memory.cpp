// SPDX-License-Identifier: Apache-2.0
// The CPU backend without memory: a MemoryError that names the bytes, and the next call works.
#include <cstdlib>
#include <new>

#include "paged_cache.h"

using namespace tiledattn;
using namespace test;

namespace {

/// Allocations of this many bytes or more fail; 0: none does.
std::size_t failing_bytes = 0;

void* allocated(std::size_t bytes) {
  void* const memory =
      failing_bytes > 0 && bytes >= failing_bytes ? nullptr : std::malloc(bytes > 0 ? bytes : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(std::size_t bytes) { return allocated(bytes); }
void* operator new[](std::size_t bytes) { return allocated(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

namespace {

struct Failing {
  explicit Failing(std::size_t bytes) { failing_bytes = bytes; }
  ~Failing() { failing_bytes = 0; }
};

/// Fails with a MemoryError that names `least` bytes or more, then works.
template <typename Call>
void check_without_memory(std::size_t least, const Call& call) {
  std::string message;
  try {
    const Failing failing(least);
    call();
  } catch (const MemoryError& error) {
    message = error.what();
  }
  CHECK(message.rfind("cpu: could not allocate ", 0) == 0);
  const std::size_t digits = message.find_first_of("0123456789");
  CHECK(digits != std::string::npos && std::stoull(message.substr(digits)) >= least);
  call();
}

}  // namespace

TEST(the_memory_of_a_thread_is_named) {
  const int before = get_num_threads();
  set_num_threads(1);
  // 16 tokens of 64 heads share one KV head, so one thread packs 1024 rows.
  const Array q(Host({1, 16, 64, 256}, 1), DType::float32, kCpu);
  const Array kv(Host({1, 9, 1, 256}, 1), DType::float32, kCpu);
  const Array out(Host({1, 16, 64, 256}, 7), DType::float32, kCpu);
  FlashArgs args;
  args.q = q;
  args.k = args.v = kv;
  args.out = out;
  check_without_memory(std::size_t{1} << 20, [&] { flash_attention(args); });
  for (const float value : download(out).values) CHECK(value == 1);
  set_num_threads(before);
}

TEST(the_list_of_tiles_is_named) {
  const Array q(Host({5000, 1, 1, 8}, 1), DType::float32, kCpu);
  const Array kv(Host({5000, 1, 1, 8}, 1), DType::float32, kCpu);
  const Array out(Host({5000, 1, 1, 8}, 7), DType::float32, kCpu);
  FlashArgs args;
  args.q = q;
  args.k = args.v = kv;
  args.out = out;
  check_without_memory(5000 * 16, [&] { flash_attention(args); });
  for (const float value : download(out).values) CHECK(value == 1);
}

TEST(the_list_of_segments_is_named) {
  const int before = get_num_threads();
  set_num_threads(8);  // few tiles for each thread: the segments of keys are shared out
  const Array q(Host({20, 1, 1, 8}, 1), DType::float32, kCpu);
  const Array kv(Host({20, 1 << 14, 1, 8}, 1), DType::float32, kCpu);
  const Array out(Host({20, 1, 1, 8}, 7), DType::float32, kCpu);
  FlashArgs args;
  args.q = q;
  args.k = args.v = kv;
  args.out = out;
  check_without_memory(20 * 64 * 16, [&] { flash_attention(args); });
  for (const float value : download(out).values) CHECK(value == 1);
  set_num_threads(before);
}
