// SPDX-License-Identifier: Apache-2.0
#include "stream/tile_fetcher.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "check_tensor.h"

namespace tiledattn {

namespace {

/// Tables of up to so many bytes go to the GPU with a launch of their own: a small copy would hold
/// the tiles' copies up.
constexpr std::int64_t kMostWritten = std::int64_t{64} << 10;

/// Of so many transfers one is timed: the clock's two marks take as long as 150 KB on a fast link.
/// No power of two, so that it is not the same tile of every call.
constexpr std::int64_t kTimedTransfers = 15;

StreamOptions checked(const StreamOptions& options) {
  if (options.num_slots < 2)
    refuse("num_slots", std::to_string(options.num_slots),
           "2 or more, so that fetching can run ahead");
  if (options.num_slots > 1024)
    refuse("num_slots", std::to_string(options.num_slots), "at most 1024");
  if (options.num_readers < 1 || options.num_readers > 1024)
    refuse("num_readers", std::to_string(options.num_readers), "1 to 1024");
  if (options.scratch_bytes < options.num_slots * kScratchAlignment) {
    refuse("scratch_bytes", std::to_string(options.scratch_bytes),
           std::to_string(options.num_slots * kScratchAlignment) + " or more");
  }
  return options;
}

/// Of one slot; refused before the bytes of all slots leave 64 bits.
std::int64_t table_bytes_of(const TiledAttentionDims& dims, std::int64_t rounds,
                            std::int64_t num_slots) {
  const double all = static_cast<double>(num_slots * rounds) * static_cast<double>(dims.max_seqs) *
                     (static_cast<double>(dims.tile_capacity) + TileTable::kVectors) *
                     sizeof(std::int64_t);
  if (all > 4e18) {
    refuse("dims.tile_capacity",
           std::to_string(dims.tile_capacity) + " blocks for each of " +
               std::to_string(dims.max_seqs) + " sequences",
           "block tables of less than 4e18 bytes in all slots");
  }
  return scratch_aligned(rounds * TileTable::bytes(dims.max_seqs, dims.tile_capacity));
}

}  // namespace

TileFetcher::TileFetcher(const TiledAttentionDims& dims, Device device,
                         const StreamOptions& options, std::unique_ptr<CopyQueue> queue)
    : dims_(dims),
      device_(device),
      options_(checked(options)),
      slot_bytes_(options.scratch_bytes / options.num_slots / kScratchAlignment *
                  kScratchAlignment),
      table_bytes_(table_bytes_of(dims, queue->immediate() ? kMostRounds : 1, options.num_slots)),
      scratch_(device, slot_bytes_ * options.num_slots),
      queue_(std::move(queue)),
      readers_(options.num_readers) {
  if (!queue_->immediate()) tables_ = Buffer(device, table_bytes_ * options.num_slots);
  for (std::int64_t i = 0; i < options.num_slots; ++i) {
    TileSlot& slot = slots_.emplace_back();
    slot.scratch = static_cast<char*>(scratch_.data()) + i * slot_bytes_;
    slot.table.host = queue_->allocate_host(table_bytes_);
    slot.table.device = queue_->immediate() ? slot.table.host.get()
                                            : static_cast<char*>(tables_.data()) + i * table_bytes_;
    slot.copied = queue_->make_event(false);
    slot.consumed = queue_->make_event(false);
    slot.started = queue_->make_event(true);
    slot.ended = queue_->make_event(true);
  }
}

std::int64_t TileFetcher::nbytes() const {
  return (slot_bytes_ + table_bytes_) * options_.num_slots;
}

TileFetcher::~TileFetcher() {
  for (TileSlot& slot : slots_) {
    if (slot.reads) slot.reads->wait();
  }
}

std::int64_t TileFetcher::capacity(const TileSource& source) const {
  if (in_place(source)) return dims_.max_seqs * dims_.tile_capacity;
  const TileGeometry geometry = source.describe();
  const std::int64_t gap = geometry.num_planes() > 1 ? kScratchAlignment : 0;
  const std::int64_t blocks = (slot_bytes_ - gap) / geometry.block_bytes();
  if (blocks >= dims_.tile_capacity) return blocks;
  const std::int64_t needed =
      scratch_aligned(dims_.tile_capacity * geometry.block_bytes() + gap) * options_.num_slots;
  throw ValueError("scratch_bytes: got " + std::to_string(options_.scratch_bytes) +
                   "; expected at least " + std::to_string(needed) + " for source '" +
                   source.name() + "': " + std::to_string(options_.num_slots) +
                   " slots that hold a tile of " + std::to_string(dims_.tile_capacity) +
                   " blocks of " + std::to_string(geometry.block_bytes()) + " bytes");
}

bool TileFetcher::in_place(const TileSource& source) const {
  const std::optional<TilePools> pools = source.pools();
  return pools && pools->k.device == device_;
}

void TileFetcher::prepare(TileSource& source) const {
  const std::optional<TilePools> pools = source.pools();
  if (pools && device_.is_cpu() && !pools->k.device.is_cpu()) {
    throw ValueError("source '" + source.name() + "': is on " + to_string(pools->k.device) +
                     ", but this StreamingAttention is on cpu");
  }
  if (!pools && source.describe().num_planes() > 1) {
    throw ValueError("source '" + source.name() +
                     "': has two planes; a source that is read has K and V of a block in one");
  }
  capacity(source);  // refuses a scratch that is too small
  source.prepare(device_);
}

void TileFetcher::fail(TileSlot& slot, std::size_t piece, std::optional<std::int64_t> got,
                       std::exception_ptr cause) {
  const TilePiece& p = slot.launch->pieces[piece];
  slot.failures[piece] = TileError({slot.launch->source->name(), p.sequence, p.position, p.count,
                                    slot.piece_bytes(piece), got, std::move(cause)});
  ++stats_.failed_tiles;
}

void TileFetcher::begin(TileSlot& slot, const TileLaunch& launch, const StreamRequest& request) {
  release(slot);
  slot.launch = &launch;
  slot.request = &request;
  slot.in_place = in_place(*launch.source);
  slot.transferred = false;
  slot.failures.assign(launch.pieces.size(), std::nullopt);
  for (std::size_t i = 0; i < launch.pieces.size(); ++i) {
    try {
      slot.leases.push_back(launch.source->pin(slot.blocks(i), launch.pieces[i].count));
    } catch (const CancelledError&) {
      throw;
    } catch (...) {
      fail(slot, i, std::nullopt, std::current_exception());
    }
  }
  if (launch.source->pools()) {
    transfer(slot);
  } else {
    begin_reads(slot);
  }
}

void TileFetcher::begin_reads(TileSlot& slot) {
  char* into = slot.scratch;
  std::shared_ptr<void> owner = scratch_.owner();
  if (!queue_->immediate()) {
    if (!slot.staging) slot.staging = queue_->allocate_host(slot_bytes_);
    into = static_cast<char*>(slot.staging.get());
    owner = slot.staging;
  }
  if (options_.poison_scratch) make_host_copy_queue()->poison(into, slot_bytes_);
  slot.reads = std::make_shared<ReadBatch>(slot.launch->pieces.size());
  for (std::size_t i = 0; i < slot.launch->pieces.size(); ++i) {
    const std::int64_t bytes = slot.piece_bytes(i);
    if (slot.failures[i]) {
      slot.reads->complete(i, {bytes, nullptr}, 0);
    } else {
      const std::int64_t* blocks = slot.blocks(i);
      try {
        readers_.post({slot.part(i).source,
                       {blocks, blocks + slot.launch->pieces[i].count},
                       into,
                       bytes,
                       owner,
                       slot.reads,
                       i});
      } catch (...) {  // a batch that is never complete would be waited for
        slot.reads->complete(i, {0, std::current_exception()}, 0);
      }
    }
    into += bytes;
  }
}

void TileFetcher::collect_reads(TileSlot& slot) {
  TierStats& tier = stats_.tiers[static_cast<int>(slot.launch->source->residency())];
  tier.seconds += slot.reads->seconds();
  const std::vector<ReadOutcome>& outcomes = slot.reads->outcomes();
  for (std::size_t i = 0; i < outcomes.size(); ++i) {
    if (slot.failures[i]) continue;
    const std::int64_t wanted = slot.piece_bytes(i);
    if (outcomes[i].error || outcomes[i].bytes != wanted)
      fail(slot, i, outcomes[i].bytes, outcomes[i].error);
  }
  slot.reads.reset();
}

void TileFetcher::advance(TileSlot& slot) {
  if (!slot.reads || !slot.reads->done()) return;
  collect_reads(slot);
  transfer(slot);
}

void TileFetcher::arrive(TileSlot& slot, const Stream& stream,
                         const std::function<void(const ReadBatch&)>& wait_for_reads) {
  if (slot.reads) {
    wait_for_reads(*slot.reads);
    advance(slot);
  }
  if (!queue_->immediate() && !slot.table_on_queue)
    queue_->write(slot.table.device, slot.table.host.get(), slot.table.bytes(), stream);
  if (slot.transferred) queue_->order(stream, *slot.copied);
}

bool TileFetcher::idle() const { return !last_copied_ || queue_->passed(*last_copied_); }

void TileFetcher::begin_copies(TileSlot& slot) {
  if (slot.transferred) return;
  slot.timed = !slot.in_place && (seconds_per_byte_ == 0 || ++transfers_ % kTimedTransfers == 0);
  queue_->order(queue_->stream(), *slot.consumed);
  if (options_.poison_scratch && !slot.in_place) queue_->poison(slot.scratch, slot_bytes_);
  if (slot.timed) queue_->record(*slot.started, queue_->stream());
  slot.transferred = true;
}

void TileFetcher::end_copies(TileSlot& slot) {
  if (!slot.transferred) return;
  queue_->record(*slot.copied, queue_->stream());
  if (slot.timed) queue_->record(*slot.ended, queue_->stream());
  last_copied_ = slot.copied.get();
}

/// An idle link gets the first pieces before the others are known, in parts that grow: each takes
/// longer to copy than the next one to find. Many small pieces are handed over some at a time too:
/// lists of them that outgrow the caches take longer to fill than the pieces to copy.
void TileFetcher::put_on_queue(TileSlot& slot) {
  constexpr std::int64_t kFirstPart = std::int64_t{512} << 10;
  constexpr std::int64_t kGrowth = 4;
  constexpr std::size_t kMostPieces = 1024;
  std::int64_t part_bytes = 0;
  std::int64_t enough = idle() ? kFirstPart : slot_bytes_;
  std::vector<CopyPiece> part;
  const auto hand_over = [&] {
    begin_copies(slot);
    queue_->copy(part);
    part.clear();
    slot.copied_bytes += std::exchange(part_bytes, 0);
    enough = std::min(enough * kGrowth, slot_bytes_);  // else many parts take it past 64 bits
  };
  for_each_copy(slot, [&](const CopyPiece& piece) {
    part.push_back(piece);
    part_bytes += piece.bytes;
    if (part_bytes >= enough || part.size() >= kMostPieces) hand_over();
  });
  fill_table(slot);
  slot.table_on_queue = slot.table.bytes() > kMostWritten;
  if (slot.table_on_queue) {
    part.push_back(
        {slot.table.device, slot.table.host.get(), slot.table.bytes(), CopyFrom::pinned});
  }
  if (!part.empty()) hand_over();
}

void TileFetcher::transfer(TileSlot& slot) {
  slot.copied_bytes = 0;
  if (queue_->immediate()) return fill_table(slot);
  try {
    put_on_queue(slot);
  } catch (...) {
    end_copies(slot);
    throw;
  }
  end_copies(slot);
}

void TileFetcher::fill_table(TileSlot& slot) {
  std::vector<bool> wanted;
  TierStats& tier = stats_.tiers[static_cast<int>(slot.launch->source->residency())];
  for (std::size_t i = 0; i < slot.failures.size(); ++i) {
    wanted.push_back(!slot.failures[i]);
    if (slot.failures[i]) continue;
    ++tier.tiles;
    tier.bytes += slot.piece_bytes(i);
  }
  slot.table.fill(*slot.launch, *slot.request, wanted, slot.in_place, dims_.block_size);
}

bool TileFetcher::reading() const {
  return std::any_of(slots_.begin(), slots_.end(),
                     [](const TileSlot& slot) { return slot.reads && !slot.reads->done(); });
}

void TileFetcher::add_kept(Prefetched& kept) const {
  for (const TileSlot& slot : slots_) {
    for (const Lease& lease : slot.leases) kept.leases.emplace_back(slot.launch->source, lease);
    for (const std::optional<TileError>& failure : slot.failures) {
      if (failure) kept.errors.push_back(failure->details().cause);
    }
    if (!slot.reads) continue;
    for (const ReadOutcome& outcome : slot.reads->outcomes()) kept.errors.push_back(outcome.error);
  }
}

TileArgs TileFetcher::tile(const TileSlot& slot, std::int64_t round, bool positions) const {
  const TileGeometry geometry = slot.launch->source->describe();
  const TilePools pools = pools_of(slot, device_);
  TileArgs args;
  args.k_pool = pools.k;
  args.v_pool = pools.v;
  args.k_scale = geometry.sizes.scales.k;
  args.v_scale = geometry.sizes.scales.v;
  slot.table.give(args, round, device_, positions);
  return args;
}

void TileFetcher::consumed(TileSlot& slot, const Stream& stream) {
  queue_->record(*slot.consumed, stream);
}

bool TileFetcher::reusable(const TileSlot& slot) const {
  if (!slot.launch) return true;
  if (slot.reads && !slot.reads->done()) return false;
  return (!slot.transferred || queue_->passed(*slot.copied)) &&
         (!slot.in_place || queue_->passed(*slot.consumed));
}

void TileFetcher::release(TileSlot& slot) {
  if (!slot.launch) return;
  // What is read where it lies is in use until the kernel has ended.
  if (slot.in_place) queue_->wait(*slot.consumed);
  if (slot.transferred) {
    queue_->wait(*slot.copied);
    count_copies(slot);
  }
  slot.leases.clear();
  slot.failures.clear();
  slot.launch = nullptr;
  slot.request = nullptr;
}

/// Copies that are not timed count as fast as those timed last.
void TileFetcher::count_copies(TileSlot& slot) {
  if (slot.copied_bytes == 0) return;
  const auto bytes = static_cast<double>(slot.copied_bytes);
  if (slot.timed) {
    queue_->wait(*slot.ended);
    seconds_per_byte_ = queue_->seconds(*slot.started, *slot.ended) / bytes;
  }
  ++stats_.link.tiles;
  stats_.link.bytes += slot.copied_bytes;
  stats_.link.seconds += seconds_per_byte_ * bytes;
}

void TileFetcher::drain() {
  readers_.withdraw();
  for (TileSlot& slot : slots_) {
    if (slot.reads) slot.reads->wait();
    slot.reads.reset();
    release(slot);
  }
}

void TileFetcher::abandon_reads(TileSlot& slot) const {
  // Not even destroyed: its mutex may be locked by a thread that the child does not have.
  if (slot.reads) new std::shared_ptr<ReadBatch>(std::move(slot.reads));
}

StreamStats TileFetcher::take_stats() { return std::exchange(stats_, {}); }

}  // namespace tiledattn
