// SPDX-License-Identifier: Apache-2.0
// StreamingAttention: the same bits as the same tiles by hand, whatever the source; and what
// happens when a source is slow, fails, is evicted from or is not wanted any more.
#include <iterator>

#include "stream/block_runs.h"
#include "stream/stream_plan.h"
#include "stream_case.h"

using namespace tiledattn;
using namespace test;

namespace {

const char* const kKinds[] = {"read", "host", "device"};

std::vector<Host> downloaded(const Array& out, const Array& lse) {
  return {download(out), download(lse)};
}

/// Out and lse of the tiles by hand.
std::vector<Host> by_hand(StreamSetup& s) {
  s.tiled.walk.cuts = even_cuts(s.tiled.cache.max_blocks(), s.c.tile);
  if (s.c.q_len > 1) s.tiled.walk.positions = s.c.positions;
  s.tiled.step();
  const Array out = s.tiled.out(s.c.dtype), lse = s.tiled.lse();
  s.tiled.attention.finalize(out, lse);
  return downloaded(out, lse);
}

Case long_case() {
  Case c = {.name = "long", .tile = 3, .lengths = {90, 0, 41, 77, 5}};
  return c;
}

}  // namespace

DEVICE_TEST(streamed_tiles_give_the_bits_of_tiles_by_hand) {
  for (const Case& c : cases()) {
    for (const char* kind : kKinds) {
      for (const std::int64_t tiles_in_a_slot : {1, 3}) {
        context = std::string(c.name) + " from " + kind + " on " + to_string(device);
        StreamSetup s(c, device, kind);
        StreamingAttention streaming = s.attention(s.options(tiles_in_a_slot));
        const Array out = s.tiled.out(c.dtype), lse = s.tiled.lse();
        const AttendResult result = streaming.attend(s.args(out, lse));
        CHECK(result.complete);
        CHECK(same_bits(downloaded(out, lse), by_hand(s)));
        const Result want = s.tiled.cache.reference(s.tiled.q, c.rules, c.positions);
        CHECK_RESULT(download(out), want.out, c.dtype);
      }
    }
  }
}

DEVICE_TEST(copies_wait_for_slow_kernels) {
  // Copies and reads could be far ahead of such kernels, and the poison with them.
  const Case c = {.name = "slow kernels",
                  .dtype = DType::bfloat16,
                  .num_q_heads = 32,
                  .num_kv_heads = 2,
                  .head_dim = 128,
                  .head_dim_v = 128,
                  .block_size = 16,
                  .q_len = 48,
                  .tile = 4,
                  .lengths = {1000, 700},
                  .rules = causal(),
                  .positions = true};
  for (const char* kind : {"read", "host"}) {
    context = std::string("slow kernels from ") + kind + " on " + to_string(device);
    StreamSetup s(c, device, kind);
    StreamingAttention streaming = s.attention(s.options());
    const Array out = s.tiled.out(c.dtype), lse = s.tiled.lse();
    streaming.attend(s.args(out, lse));
    CHECK(same_bits(downloaded(out, lse), by_hand(s)));
  }
}

DEVICE_TEST(a_second_call_starts_anew) {
  StreamSetup s(long_case(), device, "read");
  StreamingAttention streaming = s.attention(s.options());
  const Array out = s.tiled.out(s.c.dtype), lse = s.tiled.lse();
  const std::vector<Host> want = by_hand(s);
  for (int i = 0; i < 5; ++i) {
    streaming.attend(s.args(out, lse));
    CHECK(same_bits(downloaded(out, lse), want));
  }
  CHECK(streaming.stats().calls == 5);
  CHECK(streaming.stats().tiers[static_cast<int>(Residency::remote)].bytes > 0);
}

DEVICE_TEST(slow_reads_arrive_in_any_order) {
  StreamSetup s(long_case(), device, "read");
  s.reads().delay = std::chrono::milliseconds(2);
  StreamOptions options = s.options();
  options.num_readers = 7;
  StreamingAttention streaming = s.attention(options);
  const Array out = s.tiled.out(s.c.dtype), lse = s.tiled.lse();
  streaming.attend(s.args(out, lse));
  CHECK(same_bits(downloaded(out, lse), by_hand(s)));
  CHECK(streaming.stats().stall_seconds > 0);
  CHECK(s.reads().pinned == 0);
  CHECK(s.reads().unpinned_reads == 0);
}

DEVICE_TEST(a_failed_tile_changes_nothing) {
  for (const ReadSource::Fault fault : {ReadSource::Fault::throws, ReadSource::Fault::short_read}) {
    StreamSetup s(long_case(), device, "read");
    StreamingAttention streaming = s.attention(s.options());
    const Array out = s.tiled.out(s.c.dtype), lse = s.tiled.lse();
    AttendArgs args = s.args(out, lse);
    args.return_state = true;
    const State before = *streaming.attend(args).state;
    const std::vector<Host> state_before = {download(before.m()), download(before.l()),
                                            download(before.o())};
    const std::vector<Host> result_before = downloaded(out, lse);

    s.reads().bad_block = s.tiled.cache.tables[3][7];  // tile 2 of sequence 3
    s.reads().fault = fault;
    args.state = &before;
    const bool is_short = fault == ReadSource::Fault::short_read;
    CHECK_THROWS(TileError, streaming.attend(args), "source 'bytes'", "tile of 3 blocks",
                 "at position 24 of sequence 3", "wanted 3072 bytes",
                 is_short ? "got 1029" : "got the disk is gone");
    CHECK(same_bits(downloaded(out, lse), result_before));
    CHECK(same_bits({download(before.m()), download(before.l()), download(before.o())},
                    state_before));
    CHECK(s.reads().pinned == 0);

    // The object goes on.
    s.reads().fault = ReadSource::Fault::none;
    args.state = nullptr;
    streaming.attend(args);
    CHECK(same_bits(downloaded(out, lse), result_before));
  }
}

DEVICE_TEST(a_partial_result_can_be_completed) {
  StreamSetup s(long_case(), device, "read");
  StreamingAttention streaming = s.attention(s.options(2));
  const Array out = s.tiled.out(s.c.dtype), lse = s.tiled.lse();
  s.reads().bad_block = s.tiled.cache.tables[0][4];
  s.reads().fault = ReadSource::Fault::short_read;
  AttendArgs args = s.args(out, lse);
  args.on_error = OnTileError::partial;
  const AttendResult partial = streaming.attend(args);
  CHECK(!partial.complete);
  CHECK(partial.errors.size() == 1);
  CHECK(partial.errors[0].details().got_bytes == 1024 + 5);
  CHECK(partial.missing.size() == s.tiled.cache.lengths.size());
  CHECK(partial.missing[1]->parts.empty());
  CHECK(partial.missing[0]->parts.size() == 1);
  CHECK(partial.missing[0]->parts[0].position == 12);
  CHECK(partial.missing[0]->parts[0].blocks.size() == 3);
  CHECK(download(out).values[0] == 1e30f);  // an incomplete result is not written

  s.reads().fault = ReadSource::Fault::none;
  args.sequences = partial.missing;
  args.state = &*partial.state;
  CHECK(streaming.attend(args).complete);
  const Result want = s.tiled.cache.reference(s.tiled.q, s.c.rules);
  CHECK_RESULT(download(out), want.out, s.c.dtype);
  CHECK_LSE(download(lse), want.lse);
}

TEST(what_is_missing_among_tiles_folded_together_is_one_tile) {
  const int num_threads = get_num_threads();
  StreamSetup s(long_case(), kCpu, "host");
  auto& pool = static_cast<PoolSource&>(*s.source);
  const Result want = s.tiled.cache.reference(s.tiled.q, s.c.rules);
  for (const int threads : {1, 5}) {
    set_num_threads(threads);
    StreamingAttention streaming = s.attention(s.options());
    const Array out = s.tiled.out(s.c.dtype), lse = s.tiled.lse();
    AttendArgs args = s.args(out, lse);
    CHECK(pool.evict(&s.tiled.cache.tables[0][4], 1).size() == 1);
    CHECK_THROWS(TileError, streaming.attend(args), "position 12 of sequence 0", "evicted");
    args.on_error = OnTileError::partial;
    const AttendResult partial = streaming.attend(args);
    CHECK(!partial.complete);
    CHECK(partial.errors.size() == 1);
    CHECK(partial.missing[0]->parts.size() == 1);
    CHECK(partial.missing[0]->parts[0].position == 12);
    CHECK(partial.missing[0]->parts[0].blocks.size() == 3);
    pool.restore(&s.tiled.cache.tables[0][4], 1);
    args.sequences = partial.missing;
    args.state = &*partial.state;
    CHECK(streaming.attend(args).complete);
    CHECK_RESULT(download(out), want.out, s.c.dtype);
    CHECK_LSE(download(lse), want.lse);
  }
  set_num_threads(num_threads);
}

DEVICE_TEST(a_fetch_ahead_that_cannot_begin_is_the_error_of_its_own_call) {
  struct Broken final : ReadSource {
    using ReadSource::ReadSource;
    std::optional<TilePools> pools() const override {
      if (broken) throw Error("the pools are gone");
      return std::nullopt;
    }
    std::atomic<bool> broken = false;
  };
  StreamSetup s(long_case(), device, "read");
  StreamingAttention streaming = s.attention(s.options());
  const Array out = s.tiled.out(DType::float32), lse = s.tiled.lse();
  const AttendArgs args = s.args(out, lse);
  const auto source = std::make_shared<Broken>(s.tiled.cache, DType::float32);
  AttendArgs next = args;
  for (auto& sequence : next.sequences) {
    auto other = std::make_shared<StreamSequence>(*sequence);
    for (KvPart& part : other->parts) part.source = source;
    sequence = other;
  }
  CHECK(streaming.prefetch(args.sequences));
  CHECK(streaming.prefetch(next.sequences));
  source->broken = true;
  streaming.attend(args);
  CHECK_RESULT(download(out), s.tiled.cache.reference(s.tiled.q, s.c.rules).out, DType::float32);
  CHECK_THROWS(Error, streaming.attend(next), "the pools are gone");
  source->broken = false;
  streaming.attend(next);
  CHECK_RESULT(download(out), s.tiled.cache.reference(s.tiled.q, s.c.rules).out, DType::float32);
}

DEVICE_TEST(prefetch_saves_reads_and_changes_no_bit) {
  StreamSetup s(long_case(), device, "read");
  StreamingAttention streaming = s.attention(s.options());
  const Array out = s.tiled.out(s.c.dtype), lse = s.tiled.lse();
  const std::vector<Host> want = by_hand(s);
  CHECK(streaming.prefetch(s.sequences()));
  CHECK(streaming.prefetch(s.sequences()));
  CHECK(streaming.prefetch(s.sequences()));
  CHECK(!streaming.prefetch(s.sequences()));
  for (int i = 0; i < 3; ++i) {
    streaming.attend(s.args(out, lse));
    CHECK(same_bits(downloaded(out, lse), want));
  }
  const StreamStats stats = streaming.stats();
  CHECK(stats.prefetched_launches >= 3);
  CHECK(stats.dropped_launches == 0);

  // Another call than the one that was foreseen.
  CHECK(streaming.prefetch(s.sequences()));
  AttendArgs args = s.args(out, lse);
  args.q_positions.assign(args.sequences.size(), 1 << 20);
  streaming.attend(args);
  CHECK(same_bits(downloaded(out, lse), want));
  CHECK(streaming.stats().dropped_launches > 0);
  CHECK(s.reads().pinned == 0);
}

DEVICE_TEST(parts_of_several_sources_make_one_sequence) {
  StreamSetup s(long_case(), device, "read");
  const Array k(s.tiled.cache.k, s.c.dtype, device), v(s.tiled.cache.v, s.c.dtype, device);
  const auto resident = std::make_shared<PoolSource>(k, v, nullptr, "resident");
  StreamSequences mixed;
  for (const auto& sequence : s.sequences()) {
    auto copy = std::make_shared<StreamSequence>(*sequence);
    const std::vector<std::int64_t> blocks = copy->parts[0].blocks;
    const auto cut = blocks.begin() + static_cast<std::ptrdiff_t>(blocks.size() / 3);
    copy->parts = {{resident, {blocks.begin(), cut}, 0},
                   {s.source, {cut, blocks.end()}, (cut - blocks.begin()) * s.c.block_size}};
    mixed.push_back(copy);
  }
  StreamingAttention streaming = s.attention(s.options(2));
  const Array out = s.tiled.out(s.c.dtype), lse = s.tiled.lse();
  AttendArgs args = s.args(out, lse);
  args.sequences = mixed;
  streaming.attend(args);
  const Result want = s.tiled.cache.reference(s.tiled.q, s.c.rules);
  CHECK_RESULT(download(out), want.out, s.c.dtype);
  CHECK_LSE(download(lse), want.lse);
}

DEVICE_TEST(a_state_goes_on_where_it_ended) {
  StreamSetup s(long_case(), device, "host");
  StreamingAttention streaming = s.attention(s.options());
  const Array out = s.tiled.out(s.c.dtype), lse = s.tiled.lse();
  AttendArgs args = s.args(out, lse);
  StreamSequences first_tiles, others;
  for (const auto& sequence : args.sequences) {
    auto first = std::make_shared<StreamSequence>(*sequence);
    auto rest = std::make_shared<StreamSequence>(*sequence);
    const std::vector<std::int64_t>& blocks = sequence->parts[0].blocks;
    const auto cut = std::min<std::ptrdiff_t>(6, static_cast<std::ptrdiff_t>(blocks.size()));
    first->parts[0].blocks.assign(blocks.begin(), blocks.begin() + cut);
    rest->parts[0].blocks.assign(blocks.begin() + cut, blocks.end());
    rest->parts[0].position = cut * s.c.block_size;
    first_tiles.push_back(first);
    others.push_back(rest);
  }
  args.sequences = first_tiles;
  args.return_state = true;
  const State state = *streaming.attend(args).state;
  args.sequences = others;
  args.state = &state;
  streaming.attend(args);
  CHECK(same_bits(downloaded(out, lse), by_hand(s)));
}

DEVICE_TEST(sequences_without_keys_are_empty) {
  Case c = {.name = "empty", .lengths = {0, 0}, .rules = with_sinks({0.5f, -2.0f, 7.0f, -30.0f})};
  StreamSetup s(c, device, "read");
  StreamingAttention streaming = s.attention(s.options());
  const Array out = s.tiled.out(c.dtype), lse = s.tiled.lse();
  streaming.attend(s.args(out, lse));
  const Result want = s.tiled.cache.reference(s.tiled.q, c.rules);
  CHECK_RESULT(download(out), want.out, c.dtype);
  CHECK_LSE(download(lse), want.lse);
}

DEVICE_TEST(a_window_fetches_only_what_it_shows) {
  Case c = long_case();
  c.positions = true;
  c.rules = windowed(10);
  StreamSetup s(c, device, "read");
  StreamingAttention streaming = s.attention(s.options());
  const Array out = s.tiled.out(c.dtype), lse = s.tiled.lse();
  streaming.attend(s.args(out, lse));
  CHECK(same_bits(downloaded(out, lse), by_hand(s)));
  CHECK(s.reads().reads <= 2 * 4);  // at most two tiles of each sequence that has keys
}

DEVICE_TEST(cancel_ends_a_call_and_drains_it) {
  StreamSetup s(long_case(), device, "read");
  StreamingAttention streaming = s.attention(s.options());
  const Array out = s.tiled.out(s.c.dtype), lse = s.tiled.lse();
  CHECK(!streaming.cancel());
  s.reads().delay = std::chrono::milliseconds(30);
  std::thread other([&] {
    while (s.reads().reads < 2) std::this_thread::yield();
    while (!streaming.cancel()) std::this_thread::yield();
  });
  CHECK_THROWS(CancelledError, streaming.attend(s.args(out, lse)), "cancelled");
  other.join();
  CHECK(s.reads().pinned == 0);
  CHECK(download(out).values[0] == 1e30f);
  s.reads().delay = std::chrono::milliseconds(0);
  streaming.attend(s.args(out, lse));
  CHECK(same_bits(downloaded(out, lse), by_hand(s)));
}

DEVICE_TEST(poll_can_end_a_call) {
  StreamSetup s(long_case(), device, "read");
  StreamingAttention streaming = s.attention(s.options());
  const Array out = s.tiled.out(s.c.dtype), lse = s.tiled.lse();
  AttendArgs args = s.args(out, lse);
  int polls = 0;
  args.poll = [&] {
    if (++polls == 3) throw Error("interrupted");
  };
  CHECK_THROWS(Error, streaming.attend(args), "interrupted");
  CHECK(s.reads().pinned == 0);
}

DEVICE_TEST(eviction_under_load_never_shows_foreign_blocks) {
  StreamSetup s(long_case(), device, "host");
  auto& pool = static_cast<PoolSource&>(*s.source);
  const Array out = s.tiled.out(s.c.dtype), lse = s.tiled.lse();
  const std::vector<Host> want = by_hand(s);
  StreamingAttention streaming = s.attention(s.options());
  std::atomic<bool> stop = false;
  std::atomic<int> evicted = 0;
  // Takes blocks out, overwrites them, writes them anew and puts them back.
  const auto evict = [&](std::uint64_t seed) {
    Random random(seed);
    const Tensor tensors[2] = {s.host_k.tensor(), s.host_v.tensor()};
    const Host* hosts[2] = {&s.tiled.cache.k, &s.tiled.cache.v};
    while (!stop) {
      const std::int64_t block = random.below(s.tiled.cache.k.shape[0]);
      if (pool.evict(&block, 1).empty()) continue;
      ++evicted;
      for (int i = 0; i < 2; ++i) {
        auto* const data = static_cast<float*>(tensors[i].data) + block * tensors[i].strides[0];
        const float* const right = hosts[i]->values.data() + block * tensors[i].strides[0];
        std::fill_n(data, tensors[i].strides[0], 1e30f);
        std::this_thread::yield();
        std::copy_n(right, tensors[i].strides[0], data);
      }
      pool.restore(&block, 1);
    }
  };
  std::thread threads[2] = {std::thread(evict, 1), std::thread(evict, 2)};
  int refused = 0, done = 0;
  // On a busy machine it takes a while until the threads meet.
  const auto most = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while ((refused < 20 || done < 20) && std::chrono::steady_clock::now() < most) {
    try {
      streaming.attend(s.args(out, lse));
      ++done;
      CHECK(same_bits(downloaded(out, lse), want));
    } catch (const TileError& error) {
      ++refused;
      CHECK(std::string(error.what()).find("evicted") != std::string::npos);
    }
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  CHECK(refused > 0);
  CHECK(evicted > 0);
  // All leases are back.
  std::vector<std::int64_t> all(static_cast<std::size_t>(s.tiled.cache.k.shape[0]));
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::int64_t>(i);
  CHECK(pool.evict(all.data(), static_cast<std::int64_t>(all.size())).size() == all.size());
}

DEVICE_TEST(one_object_in_several_threads_is_serialised) {
  StreamSetup s(long_case(), device, "read");
  StreamingAttention streaming = s.attention(s.options());
  const std::vector<Host> want = by_hand(s);
  std::vector<std::thread> threads;
  std::vector<Array> outs, lses;
  for (int i = 0; i < 3; ++i) {
    outs.push_back(s.tiled.out(s.c.dtype));
    lses.push_back(s.tiled.lse());
  }
  for (std::size_t i = 0; i < 3; ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < 5; ++round) {
        streaming.prefetch(s.sequences());
        streaming.attend(s.args(outs[i], lses[i]));
        (void)streaming.stats();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::size_t i = 0; i < 3; ++i) CHECK(same_bits(downloaded(outs[i], lses[i]), want));
}

DEVICE_TEST(what_is_wrong_is_named) {
  StreamSetup s(long_case(), device, "read");
  StreamingAttention streaming = s.attention(s.options());
  const Array out = s.tiled.out(s.c.dtype), lse = s.tiled.lse();
  const AttendArgs good = s.args(out, lse);

  AttendArgs args = good;
  args.sequences.pop_back();
  CHECK_THROWS(ValueError, streaming.attend(args), "q: got 5 sequences", "expected 4");
  args = good;
  auto sequence = std::make_shared<StreamSequence>(*good.sequences[2]);
  sequence->parts[0].blocks[1] = 1 << 20;
  args.sequences[2] = sequence;
  CHECK_THROWS(IndexError, streaming.attend(args), "sequences[2].parts[0].blocks[1]", "1048576",
               "source 'bytes'");
  sequence = std::make_shared<StreamSequence>(*good.sequences[2]);
  sequence->parts.push_back(sequence->parts[0]);
  args.sequences[2] = sequence;
  CHECK_THROWS(ValueError, streaming.attend(args), "sequences[2].parts[1].position", "got 0",
               "44 or more");
  args = good;
  args.q_positions = {1, 2};
  CHECK_THROWS(ValueError, streaming.attend(args), "q_positions", "2 numbers", "5");
  args = good;
  args.out = lse;
  CHECK_THROWS(ValueError, streaming.attend(args), "out");
  args = good;
  const Array half(s.tiled.q, DType::float16, device);
  args.q = half;
  CHECK_THROWS(TypeError, streaming.attend(args), "source 'bytes' holds float32", "float16");
  CHECK(s.reads().reads == 0);

  StreamOptions options = s.options();
  options.scratch_bytes = 3 * 256;
  CHECK_THROWS(ValueError, s.attention(options).attend(good), "scratch_bytes: got 768",
               "at least 9216", "source 'bytes'", "3 blocks of 1024 bytes");
  options.num_slots = 1;
  CHECK_THROWS(ValueError, s.attention(options), "num_slots", "2 or more");

  Case other = long_case();
  other.block_size = 8;
  StreamSetup t(other, device, "read");
  args = good;
  args.sequences = t.sequences();
  CHECK_THROWS(ValueError, streaming.attend(args), "sequences[0].parts[0]", "block_size 8", "4");
}

TEST(pools_are_planes_of_whole_blocks) {
  const Tensor paged = layout_of({6, 4, 2, 16}, DType::float32, kCpu);
  const Array memory(Host({6, 4, 2, 16}), paged);
  const TileGeometry two = PoolSource(memory, memory).describe();
  CHECK(two.num_planes() == 1);  // the same blocks as K and as V
  const Array other(Host({6, 4, 2, 8}), DType::float32, kCpu);
  const TileGeometry apart = PoolSource(memory, other).describe();
  CHECK(apart.num_planes() == 2);
  CHECK(apart.plane_bytes[0] == 4 * 2 * 16 * 4);
  CHECK(apart.plane_bytes[1] == 4 * 2 * 8 * 4);

  // [num_blocks, K|V, heads, tokens, dim]
  const Array both(Host({6, 2, 2, 4, 16}), DType::float32, kCpu);
  Tensor k = memory.tensor();
  k.data = both.tensor().data;
  const std::int64_t strides[4] = {256, 16, 64, 1};
  std::copy(strides, strides + 4, k.strides);
  Tensor v = k;
  v.data = static_cast<float*>(k.data) + 128;
  const TileGeometry beside = PoolSource(k, v).describe();
  CHECK(beside.num_planes() == 1);
  CHECK(beside.block_bytes() == 1024);
  CHECK(beside.v.offset == 128);

  Tensor mixed = memory.tensor();
  std::swap(mixed.strides[0], mixed.strides[1]);
  CHECK_THROWS(ValueError, PoolSource(mixed, mixed), "k_pool", "one run of memory");
  CHECK_THROWS(TypeError, PoolSource(memory, Array(Host({6, 4, 2, 8}), DType::float16, kCpu)),
               "v_pool", "float16");
}

TEST(a_new_pool_is_empty_memory_of_the_right_shape) {
  const TileSizes sizes{5, 16, 2, 64, 32, DType::bfloat16};
  const auto pool = PoolSource::allocate(sizes, BlockLayout::hnd, "host cache");
  const TilePools pools = *pool->pools();
  CHECK(shape_to_string(pools.k) == "[5, 16, 2, 64]");
  CHECK(shape_to_string(pools.v) == "[5, 16, 2, 32]");
  CHECK(pools.k.strides[2] == 16 * 64);
  CHECK(pool->residency() == Residency::host);
  CHECK_THROWS(ValueError,
               PoolSource::allocate({5, 16, 2, 300, 0, DType::float32}, BlockLayout::nhd),
               "head_dim", "300");
}

TEST(copies_are_runs_that_stay_inside_the_memory_of_the_source) {
  /// Memory that is pinned from byte 1000 on, in pieces of 1000 bytes.
  struct Pieces final : ReadSource {
    using ReadSource::ReadSource;
    SourceRun run_at(const void* address) const override {
      const std::int64_t at = static_cast<const char*>(address) - base;
      return {base + (at / 1000 + 1) * 1000, at >= 1000};
    }
    const char* base = nullptr;
  };
  Random random(3);
  const PagedCache cache(random, {9}, {});
  Pieces source(cache, DType::float32);
  std::vector<char> memory(5000), scratch(5000);
  source.base = memory.data();
  const PlaneCopy plane{&source, memory.data(), scratch.data(), 600, 500};
  const std::int64_t blocks[] = {3, 0, 1, 2, 7};
  std::vector<CopyPiece> copies;
  for_each_run(plane, blocks, 5, [&](const CopyPiece& piece) { copies.push_back(piece); });
  const std::int64_t wanted[][3] = {// to, from, bytes
                                    {0, 1800, 200},
                                    {200, 2000, 300},
                                    {600, 0, 1000},
                                    {1600, 1000, 700},
                                    {2400, 4200, 500}};
  CHECK(copies.size() == std::size(wanted));
  for (std::size_t i = 0; i < copies.size() && i < std::size(wanted); ++i) {
    CHECK(static_cast<char*>(copies[i].to) - scratch.data() == wanted[i][0]);
    CHECK(static_cast<const char*>(copies[i].from) - memory.data() == wanted[i][1]);
    CHECK(copies[i].bytes == wanted[i][2]);
    CHECK(copies[i].from_memory == (wanted[i][1] >= 1000 ? CopyFrom::pinned : CopyFrom::pageable));
  }
}

TEST(launches_that_need_no_scratch_are_joined_in_their_order) {
  const TileSizes sizes{64, 16, 1, 16, 16, DType::float32};  // blocks of 2 KiB
  const auto a = PoolSource::allocate(sizes, BlockLayout::hnd);
  const auto b = PoolSource::allocate(sizes, BlockLayout::hnd);
  const auto launch = [](const std::shared_ptr<PoolSource>& source, std::int64_t first) {
    return TileLaunch{
        source.get(), {{0, 0, first, 4, first * 16}, {1, 0, first, 2, first * 16}}, 6, 1};
  };
  const std::vector<TileLaunch> launches = {launch(a, 0), launch(a, 4),  launch(a, 8),
                                            launch(b, 0), launch(a, 12), launch(a, 16)};
  const auto joined = [&](std::int64_t bytes, bool in_place) {
    return join_launches(launches, bytes, [&](const TileSource&) { return in_place; });
  };
  CHECK(joined(1 << 20, false).size() == 6);
  CHECK(joined(1, true).size() == 6);
  const std::vector<TileLaunch> all = joined(1 << 20, true);
  CHECK(all.size() == 3);
  CHECK(all[0].num_rounds == 3 && all[1].num_rounds == 1 && all[2].num_rounds == 2);
  CHECK(all[0].num_blocks == 18 && all[1].source == b.get());
  for (std::int64_t i = 0; i < 6; ++i) {
    const TilePiece& piece = all[0].pieces[static_cast<std::size_t>(i)];
    CHECK(piece.round == i / 2 && piece.sequence == i % 2 && piece.first == i / 2 * 4);
  }
  CHECK(joined(12 * 2048, true).size() == 4);  // two of a, one, b, two
  const std::vector<TileLaunch> many(static_cast<std::size_t>(kMostRounds) + 3, launch(a, 0));
  CHECK(join_launches(many, 1 << 30, [](const TileSource&) { return true; }).size() == 2);
}
