// SPDX-License-Identifier: Apache-2.0
// StreamingAttention: the order of things. What is fetched is stream_plan.h's decision, how is
// tile_fetcher.h's; the tiles are folded by a TiledAttention whose state nobody else sees.
#include "tiledattn/streaming.h"

#include <unistd.h>

#include <atomic>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "backend.h"
#include "check_tensor.h"
#include "stream/attend_checks.h"
#include "stream/call_lock.h"
#include "stream/launch_queue.h"
#include "stream/stopwatch.h"
#include "stream/stream_plan.h"
#include "stream/tile_fetcher.h"

namespace tiledattn {

namespace {

/// Of tiles that the CPU reads in place: many times what the threads take to meet, and few enough
/// for cancel() to be heard.
constexpr std::int64_t kJoinedBytes = std::int64_t{256} << 20;

void add(TierStats& to, const TierStats& more) {
  to.tiles += more.tiles;
  to.bytes += more.bytes;
  to.seconds += more.seconds;
}

/// The sequences that the failed tiles leave to be done.
StreamSequences missing_sequences(const StreamSequences& sequences,
                                  const std::vector<TilePiece>& failed) {
  std::vector<std::shared_ptr<StreamSequence>> missing;
  for (const auto& sequence : sequences) {
    missing.push_back(std::make_shared<StreamSequence>());
    missing.back()->length = sequence->length;
  }
  for (const TilePiece& piece : failed) {
    const auto b = static_cast<std::size_t>(piece.sequence);
    const KvPart& part = sequences[b]->parts[static_cast<std::size_t>(piece.part)];
    const auto first = part.blocks.begin() + piece.first;
    missing[b]->parts.push_back({part.source, {first, first + piece.count}, piece.position});
  }
  return {missing.begin(), missing.end()};
}

}  // namespace

struct StreamingAttention::Impl {
  Impl(const TiledAttentionDims& checked, Device where, const ScoreOptions& options,
       const StreamOptions& stream_options)
      : dims(checked),
        device(where),
        backend(backend_for(where)),
        window(options.window),
        stream_options(stream_options),
        fetcher(checked, where, stream_options, backend.make_copy_queue(where.index)),
        work(checked, where, options) {}

  ~Impl() {
    try {
      queue.drop_all();
    } catch (...) {  // a device that has failed: there is nothing left to wait for
    }
  }

  // ---- Calls ----

  /// False in the child of a fork until its first call: nothing is under way there.
  bool here() const { return process == getpid(); }

  /// Waits for the calls of other threads. A call that would wait for itself is refused.
  std::unique_lock<CallLock> enter() {
    if (fetcher.in_read()) {
      throw ValueError(
          "StreamingAttention: called by the read() of a source that the same object waits for; "
          "use another object there");
    }
    std::unique_lock<CallLock> turn(call_lock);
    if (!here()) {
      for (TileSlot& slot : fetcher.slots()) fetcher.abandon_reads(slot);
      queue.drop_all();
      process = getpid();
    }
    return turn;
  }

  // ---- Fetching ahead ----

  /// Does step_tile have to know positions? With them a token sees no key after its own.
  bool needs_positions(std::int64_t q_len, const std::vector<std::int64_t>& q_positions) const {
    return window.bounded() || q_len > 1 || !q_positions.empty();
  }

  std::shared_ptr<FetchJob> make_job(StreamRequest request, bool causal) {
    std::set<const void*> seen;
    for (const auto& sequence : request.sequences) {
      for (const KvPart& part : sequence->parts) {
        if (seen.insert(part.source->key()).second) fetcher.prepare(*part.source);
      }
    }
    auto job = std::make_shared<FetchJob>();
    job->request = std::move(request);
    job->launches = plan_stream(job->request, dims, window, causal,
                                [&](const TileSource& source) { return fetcher.capacity(source); });
    // The threads of a CPU meet at the end of each launch. A GPU has its order without.
    if (fetcher.queue().immediate()) {
      job->launches = join_launches(job->launches, kJoinedBytes, [&](const TileSource& source) {
        return fetcher.in_place(source);
      });
    }
    return job;
  }

  /// The job of an attend(): prefetched, or new, when everything that was prefetched is dropped.
  std::shared_ptr<FetchJob> take_job(StreamRequest request, bool causal) {
    if (auto job = queue.prefetched(request)) return job;
    std::shared_ptr<FetchJob> job = make_job(std::move(request), causal);
    queue.drop_all();
    queue.add(job);
    return job;
  }

  // ---- Attending ----

  void stop_if_asked(const AttendArgs& args) const {
    if (args.poll) args.poll();
    if (!here()) CallLock::refuse_forked();  // by poll
    if (phase == Phase::cancelled) refuse_cancelled();
  }

  [[noreturn]] static void refuse_cancelled() {
    throw CancelledError("attend was cancelled; out, lse and state are unchanged");
  }

  /// From here on cancel() comes too late, and says so.
  void begin_result() {
    Phase expected = Phase::running;
    if (!phase.compare_exchange_strong(expected, Phase::writing)) refuse_cancelled();
  }

  /// All refusals. Nothing that is under way changes.
  StreamRequest check(const AttendArgs& args, const Stream& stream) const {
    StreamRequest request = check_attend(dims, device, args);
    if (backend.capture_id(device.index, stream) != 0) {
      throw ValueError(
          "stream: is in a graph capture; StreamingAttention waits for its sources and cannot be "
          "captured");
    }
    return request;
  }

  void wait_for_reads(const ReadBatch& reads, const AttendArgs& args) {
    while (!reads.wait_for(std::chrono::milliseconds(20))) stop_if_asked(args);
  }

  /// Fold the next launch; with OnTileError::partial as far as its tiles are there.
  void fold(const AttendArgs& args, bool with_positions, const Stream& stream, AttendResult& result,
            std::vector<TilePiece>& failed) {
    TileSlot& slot = queue.front();
    const Stopwatch waiting;
    fetcher.arrive(slot, stream, [&](const ReadBatch& reads) { wait_for_reads(reads, args); });
    stats.stall_seconds += waiting.seconds();
    for (std::size_t i = 0; i < slot.failures.size(); ++i) {
      if (!slot.failures[i]) continue;
      // Made anew: a copy shares its text with the slot's, which the next call of any thread
      // clears.
      TileError error(slot.failures[i]->details());
      if (args.on_error == OnTileError::raise) throw error;
      failed.push_back(slot.launch->pieces[i]);
      result.errors.push_back(std::move(error));
    }
    const std::int64_t num_rounds = slot.launch->num_rounds;
    std::vector<TileArgs> tiles;
    for (std::int64_t round = 0; round < num_rounds; ++round) {
      tiles.push_back(fetcher.tile(slot, round, with_positions));
      tiles.back().q = args.q;
    }
    work.step_tiles(tiles, stream);
    fetcher.consumed(slot, stream);
    queue.take_front();
    stats.launches += num_rounds;
  }

  /// Begin the working state, and put this call after what may touch the same memory.
  void start(const AttendArgs& args, const Stream& stream) {
    if (last_stream) backend.order(device.index, stream, *last_stream);
    last_stream = stream;
    // What this stream has yet to write into the sources comes before they are read.
    backend.order(device.index, fetcher.queue().stream(), stream);
    if (args.state) {
      work.load_state(*args.state, launch_stream(stream));
    } else {
      work.begin_step(static_cast<std::int64_t>(args.sequences.size()));
    }
  }

  AttendResult run(const AttendArgs& args, StreamRequest request, const Stream& stream) {
    const bool with_positions = needs_positions(request.q_len, args.q_positions);
    start(args, stream);
    const std::shared_ptr<FetchJob> job = take_job(std::move(request), with_positions);
    AttendResult result;
    std::vector<TilePiece> failed;
    for (std::size_t launch = 0; launch < job->launches.size(); ++launch) {
      stop_if_asked(args);
      queue.fill(queue.empty(), false);
      fold(args, with_positions, stream, result, failed);
    }
    begin_result();
    result.complete = failed.empty();
    if (!result.complete) result.missing = missing_sequences(args.sequences, failed);
    if (args.return_state || !result.complete) result.state = work.state(launch_stream(stream));
    if (result.complete) work.finalize(args.out, args.lse, launch_stream(stream));
    queue.finish_first_job();
    return result;
  }

  std::optional<Stream> launch_stream(const Stream& stream) const {
    if (device.is_cpu()) return std::nullopt;
    return stream;
  }

  /// Make what was counted since the last call visible to stats().
  void publish_stats() {
    const StreamStats fetched = fetcher.take_stats();
    const auto lock = lock_stats();
    published.calls += stats.calls;
    published.launches += stats.launches;
    published.failed_tiles += fetched.failed_tiles;
    published.prefetched_launches += stats.prefetched_launches;
    published.dropped_launches += stats.dropped_launches;
    published.seconds += stats.seconds;
    published.stall_seconds += stats.stall_seconds;
    for (int i = 0; i < kNumResidencies; ++i) add(published.tiers[i], fetched.tiers[i]);
    add(published.link, fetched.link);
    stats = {};
  }

  /// Nobody else looks at them in the child of a fork, where a thread that is no more may have
  /// locked them.
  std::unique_lock<std::mutex> lock_stats() {
    return here() ? std::unique_lock<std::mutex>(stats_mutex) : std::unique_lock<std::mutex>();
  }

  TiledAttentionDims dims;
  Device device;
  const Backend& backend;
  Window window;
  StreamOptions stream_options;
  TileFetcher fetcher;
  TiledAttention work;  // its state is private until every tile is in

  CallLock call_lock;                     // for all down to queue
  std::atomic<pid_t> process = getpid();  // whose threads and calls there are
  std::optional<Stream> last_stream;
  StreamStats stats;  // of the call under way
  LaunchQueue queue{fetcher, stats};

  enum class Phase : std::uint8_t { idle, running, cancelled, writing };
  std::atomic<Phase> phase = Phase::idle;  // of attend
  std::mutex stats_mutex;
  StreamStats published;
};

/// Says that an attend is under way, for cancel().
struct StreamingAttention::Running {
  explicit Running(Impl& owner) : impl(owner) { impl.phase = Impl::Phase::running; }
  ~Running() { impl.phase = Impl::Phase::idle; }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;
  Impl& impl;
};

StreamingAttention::StreamingAttention(const TiledAttentionDims& dims, Device device,
                                       const ScoreOptions& score, const StreamOptions& options)
    : impl_(std::make_unique<Impl>(dims.validated(), device, score, options)) {}

StreamingAttention::~StreamingAttention() {
  if (!impl_) return;
  if (!impl_->here()) {
    // What a child of a fork has not used may be locked by threads that it does not have.
    static_cast<void>(impl_.release());
  } else if (impl_->fetcher.in_read()) {
    // A source dropped the last reference, in a read that the end waits for.
    std::thread([ended = std::move(impl_)] {}).detach();
  }
}

StreamingAttention::StreamingAttention(StreamingAttention&&) noexcept = default;

StreamingAttention& StreamingAttention::operator=(StreamingAttention&& other) noexcept {
  StreamingAttention former(std::move(other));
  std::swap(impl_, former.impl_);
  return *this;
}

AttendResult StreamingAttention::attend(const AttendArgs& args, Stream stream) {
  Impl& self = *impl_;
  const auto turn = self.enter();
  StreamRequest request = self.check(args, stream);
  const Running running(self);
  const Stopwatch whole;
  try {
    AttendResult result = self.run(args, std::move(request), stream);
    ++self.stats.calls;
    self.stats.seconds += whole.seconds();
    self.publish_stats();
    return result;
  } catch (...) {
    if (self.here()) self.queue.drop_all();
    self.stats.seconds += whole.seconds();
    self.publish_stats();
    throw;
  }
}

bool StreamingAttention::prefetch(const StreamSequences& sequences, std::int64_t q_len,
                                  const std::vector<std::int64_t>& q_positions) {
  Impl& self = *impl_;
  const auto turn = self.enter();
  if (q_len < 1 || q_len > self.dims.max_q_len) {
    refuse("q_len", std::to_string(q_len),
           "1 to dims.max_q_len = " + std::to_string(self.dims.max_q_len));
  }
  check_sequences(sequences, self.dims);
  StreamRequest request{sequences, q_len, check_q_positions(sequences, q_len, q_positions)};
  if (self.queue.full()) return false;
  self.queue.add(self.make_job(std::move(request), self.needs_positions(q_len, q_positions)));
  self.queue.fill(false, true);
  self.publish_stats();
  return true;
}

void StreamingAttention::discard() {
  if (!impl_->here()) return;
  const auto turn = impl_->enter();
  impl_->queue.drop_all();
  impl_->publish_stats();
}

Prefetched StreamingAttention::prefetched() const {
  Prefetched kept;
  if (!impl_->here() || impl_->fetcher.reading()) return kept;
  for (const std::shared_ptr<FetchJob>& job : impl_->queue.jobs()) {
    const StreamSequences& sequences = job->request.sequences;
    kept.sequences.insert(kept.sequences.end(), sequences.begin(), sequences.end());
  }
  impl_->fetcher.add_kept(kept);
  return kept;
}

bool StreamingAttention::cancel() {
  using Phase = Impl::Phase;
  if (!impl_->here()) return false;
  Phase phase = Phase::running;
  return impl_->phase.compare_exchange_strong(phase, Phase::cancelled) || phase == Phase::cancelled;
}

const TiledAttentionDims& StreamingAttention::dims() const { return impl_->dims; }
Device StreamingAttention::device() const { return impl_->device; }
const StreamOptions& StreamingAttention::options() const { return impl_->stream_options; }

StreamStats StreamingAttention::stats() const {
  const auto lock = impl_->lock_stats();
  return impl_->published;
}

void StreamingAttention::reset_stats() {
  const auto lock = impl_->lock_stats();
  impl_->published = {};
}

std::int64_t StreamingAttention::nbytes() const {
  return impl_->fetcher.nbytes() + impl_->work.nbytes();
}

}  // namespace tiledattn
