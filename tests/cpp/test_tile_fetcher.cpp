// SPDX-License-Identifier: Apache-2.0
// The waits between sources, copies and kernels, on two streams that are threads of this test: they
// take their time, so that work runs as late as it may. Slots are poisoned before each use; a wait
// that is missing shows as NaN, as a fault in the tables, or as a race.
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <numeric>

#include "stream/block_runs.h"
#include "stream/tile_fetcher.h"
#include "stream_case.h"

using namespace tiledattn;
using namespace test;

namespace {

/// Numbers the records of an event; a wait is for the last one before it.
class LateEvent final : public StreamEvent {
 public:
  int record() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return ++recorded_;
  }
  int last_record() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return recorded_;
  }
  void pass(int number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    passed_ = number;
    changed_.notify_all();
  }
  bool has_passed() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return passed_ >= recorded_;
  }
  void wait_for(int number) const {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return passed_ >= number; });
  }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  int recorded_ = 0;
  int passed_ = 0;
};

/// Does its work in order, some time later.
class LateStream {
 public:
  explicit LateStream(std::chrono::microseconds delay) : delay_(delay) {}
  ~LateStream() {
    post([this] { ended_ = true; });
    thread_.join();
  }
  void post(std::function<void()> work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    work_.push_back(std::move(work));
    changed_.notify_all();
  }
  /// Work that takes time, as opposed to events.
  void post_slow(std::function<void()> work) {
    post([this, work = std::move(work)] {
      std::this_thread::sleep_for(delay_);
      work();
    });
  }

 private:
  void run() {
    while (!ended_) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return !work_.empty(); });
      const std::function<void()> next = std::move(work_.front());
      work_.pop_front();
      lock.unlock();
      next();
    }
  }

  std::chrono::microseconds delay_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  bool ended_ = false;
  std::thread thread_{[this] { run(); }};
};

Stream handle_of(LateStream& stream) { return {&stream}; }
LateStream& late(const Stream& stream) { return *static_cast<LateStream*>(stream.handle); }
LateEvent& late(const StreamEvent& event) {
  return const_cast<LateEvent&>(static_cast<const LateEvent&>(event));
}

/// What a GPU does, by threads.
class LateCopyQueue : public CopyQueue {
 public:
  explicit LateCopyQueue(std::chrono::microseconds delay) : copies_(delay) {}

  const Stream& stream() const override { return stream_; }
  bool immediate() const override { return false; }
  std::unique_ptr<StreamEvent> make_event(bool) const override {
    return std::make_unique<LateEvent>();
  }
  void record(StreamEvent& event, const Stream& stream) const override {
    late(stream).post(
        [&event = late(event), number = late(event).record()] { event.pass(number); });
  }
  void order(const Stream& waiting, const StreamEvent& event) const override {
    late(waiting).post(
        [&event = late(event), number = late(event).last_record()] { event.wait_for(number); });
  }
  bool passed(const StreamEvent& event) const override { return late(event).has_passed(); }
  void wait(const StreamEvent& event) const override {
    late(event).wait_for(late(event).last_record());
  }
  double seconds(const StreamEvent&, const StreamEvent&) const override { return 0; }

  void copy(const std::vector<CopyPiece>& pieces) const override {
    copies_.post_slow([pieces] { make_host_copy_queue()->copy(pieces); });
  }
  void write(void* to, const void* from, std::int64_t bytes, const Stream& stream) const override {
    const auto* const begin = static_cast<const char*>(from);
    late(stream).post([to, kept = std::vector<char>(begin, begin + bytes)] {
      std::memcpy(to, kept.data(), kept.size());
    });
  }
  void poison(void* data, std::int64_t bytes) const override {
    copies_.post([data, bytes] { make_host_copy_queue()->poison(data, bytes); });
  }
  std::shared_ptr<void> allocate_host(std::int64_t bytes) const override {
    return cpu_backend().allocate(0, bytes);
  }

 private:
  mutable LateStream copies_;
  Stream stream_ = handle_of(copies_);
};

/// Copies nothing, but counts.
class CountingQueue final : public LateCopyQueue {
 public:
  explicit CountingQueue(std::vector<std::size_t>& sizes)
      : LateCopyQueue(std::chrono::microseconds(0)), sizes_(sizes) {}
  void copy(const std::vector<CopyPiece>& pieces) const override {
    sizes_.push_back(pieces.size());
  }

 private:
  std::vector<std::size_t>& sizes_;
};

/// Pools of another device, which nothing here reads.
class FarSource final : public TileSource {
 public:
  explicit FarSource(const TileSizes& sizes)
      : geometry_(TileGeometry::packed(sizes, BlockLayout::nhd)) {}
  std::string name() const override { return "far"; }
  TileGeometry describe() const override { return geometry_; }
  std::optional<TilePools> pools() const override {
    char* const planes[2] = {bytes_.get(), nullptr};
    return pools_at(geometry_, planes, geometry_.sizes.num_blocks, {DeviceKind::cuda, 0});
  }

 private:
  TileGeometry geometry_;
  std::unique_ptr<char[]> bytes_ = std::make_unique_for_overwrite<char[]>(
      static_cast<std::size_t>(geometry_.sizes.num_blocks * geometry_.block_bytes()));
};

/// All launches of a case through a fetcher, with kernels on a stream of their own. The results, or
/// nothing when a kernel found its arguments wrong.
std::vector<Host> run_late(StreamSetup& s, std::chrono::microseconds copy_delay,
                           std::chrono::microseconds kernel_delay) {
  const TiledAttentionDims dims = s.dims();
  const StreamOptions options = s.options(2);
  TileFetcher fetcher(dims, kCpu, options, std::make_unique<LateCopyQueue>(copy_delay));
  StreamRequest request{s.sequences(), 1, {}};
  request.q_positions = check_q_positions(request.sequences, 1, {});
  const std::vector<TileLaunch> launches = plan_stream(
      request, dims, {}, false, [&](const TileSource& source) { return fetcher.capacity(source); });
  TiledAttention attention(dims, kCpu);
  attention.begin_step(s.tiled.cache.num_seqs());
  std::vector<TileSlot>& slots = fetcher.slots();
  std::atomic<bool> good = true;
  {
    LateStream kernels(kernel_delay);
    std::size_t begun = 0;
    for (std::size_t i = 0; i < launches.size(); ++i) {
      for (; begun < std::min(launches.size(), i + slots.size()); ++begun) {
        TileSlot& next = slots[begun % slots.size()];
        if (begun > i && !fetcher.reusable(next)) break;
        fetcher.begin(next, launches[begun], request);
      }
      TileSlot& slot = slots[i % slots.size()];
      fetcher.arrive(slot, handle_of(kernels), [](const ReadBatch& reads) { reads.wait(); });
      TileArgs tile = fetcher.tile(slot, 0, false);
      tile.q = s.tiled.q_array;
      kernels.post_slow([&, tile] {
        try {
          attention.step_tile(tile);
        } catch (const Error&) {
          good = false;
        }
      });
      fetcher.consumed(slot, handle_of(kernels));
    }
    fetcher.drain();
  }
  if (!good) return {};
  const Array out = s.tiled.out(s.c.dtype), lse = s.tiled.lse();
  attention.finalize(out, lse);
  return {download(out), download(lse)};
}

std::vector<Host> by_hand(StreamSetup& s) {
  s.tiled.walk.cuts = even_cuts(s.tiled.cache.max_blocks(), s.c.tile);
  s.tiled.step();
  const Array out = s.tiled.out(s.c.dtype), lse = s.tiled.lse();
  s.tiled.attention.finalize(out, lse);
  return {download(out), download(lse)};
}

constexpr std::chrono::microseconds kNoDelay{0};
const Case kLong = {.name = "long", .tile = 2, .lengths = {90, 0, 41, 77, 5}};

}  // namespace

TEST(kernels_wait_for_late_copies) {
  StreamSetup s(kLong, kCpu, "read");
  CHECK(same_bits(run_late(s, std::chrono::milliseconds(2), kNoDelay), by_hand(s)));
}

TEST(copies_wait_for_late_kernels) {
  StreamSetup s(kLong, kCpu, "read");
  CHECK(same_bits(run_late(s, kNoDelay, std::chrono::milliseconds(2)), by_hand(s)));
}

TEST(reads_wait_for_copies_out_of_their_memory) {
  StreamSetup s(kLong, kCpu, "read");
  s.reads().delay = std::chrono::milliseconds(1);
  for (const int late_copies : {1, 3}) {
    const std::chrono::milliseconds delay(late_copies);
    CHECK(same_bits(run_late(s, delay, delay), by_hand(s)));
  }
}

TEST(leases_last_until_the_kernel_that_reads_in_place_has_ended) {
  StreamSetup s(kLong, kCpu, "host");  // on the CPU: in place
  auto& pool = static_cast<PoolSource&>(*s.source);
  TileFetcher fetcher(s.dims(), kCpu, s.options(), std::make_unique<LateCopyQueue>(kNoDelay));
  StreamRequest request{s.sequences(), 1, {}};
  request.q_positions = check_q_positions(request.sequences, 1, {});
  const std::vector<TileLaunch> launches = plan_stream(
      request, s.dims(), {}, false, [&](const TileSource& x) { return fetcher.capacity(x); });
  const std::vector<std::int64_t>& blocks = s.tiled.cache.tables[0];  // the first two are a tile
  std::mutex gate;
  TileSlot& slot = fetcher.slots()[0];
  LateStream kernels(kNoDelay);
  std::unique_lock<std::mutex> closed(gate);
  kernels.post([&] { const std::lock_guard<std::mutex> passing(gate); });
  fetcher.begin(slot, launches[0], request);
  fetcher.arrive(slot, handle_of(kernels), [](const ReadBatch&) {});
  fetcher.consumed(slot, handle_of(kernels));
  fetcher.queue().wait(*slot.copied);
  CHECK(!fetcher.reusable(slot));
  CHECK(pool.evict(blocks.data(), 2).empty());
  closed.unlock();
  fetcher.release(slot);
  CHECK(pool.evict(blocks.data(), 2).size() == 2);
}

TEST(many_small_pieces_are_copied_a_thousand_at_a_time) {
  constexpr std::int64_t kBlocks = 40000;
  const auto source = std::make_shared<FarSource>(TileSizes{kBlocks, 1, 1, 8, 8, DType::float32});
  auto sequence = std::make_shared<StreamSequence>();
  sequence->length = kBlocks;
  std::vector<std::int64_t> blocks;
  for (std::int64_t i = kBlocks; i-- > 0;) blocks.push_back(i);  // no two are neighbours
  sequence->parts = {{source, blocks, 0}};
  TiledAttentionDims dims;
  dims.max_seqs = dims.num_q_heads = dims.num_kv_heads = dims.block_size = 1;
  dims.head_dim = 8;
  dims.tile_capacity = kBlocks;
  StreamOptions options;
  options.num_slots = 2;
  options.scratch_bytes = 2 * (kBlocks * source->describe().block_bytes() + 256);
  std::vector<std::size_t> sizes;
  TileFetcher fetcher(dims, kCpu, options, std::make_unique<CountingQueue>(sizes));
  StreamRequest request{{sequence}, 1, {kBlocks - 1}};
  const std::vector<TileLaunch> launches = plan_stream(
      request, dims, {}, false, [&](const TileSource& x) { return fetcher.capacity(x); });
  CHECK(launches.size() == 1);
  fetcher.begin(fetcher.slots()[0], launches[0], request);
  CHECK(sizes.size() == (kBlocks + 1023) / 1024);
  CHECK(std::accumulate(sizes.begin(), sizes.end(), std::size_t{0}) == kBlocks + 1);  // the table
  fetcher.drain();
}
