// SPDX-License-Identifier: Apache-2.0
// Exact attention over KV that is fetched tile by tile while it is attended to.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tiledattn/attention.h"
#include "tiledattn/tile_source.h"

namespace tiledattn {

/// Blocks of one source that hold keys of one sequence, in the order of the sequence.
struct KvPart {
  std::shared_ptr<TileSource> source;
  std::vector<std::int64_t> blocks;
  std::int64_t position = 0;  ///< of the first slot of the first block
};

/// The keys of one sequence: its parts in the order of keys. Keys from `length` on do not count,
/// and keys that no part holds are left out.
struct StreamSequence {
  std::int64_t length = 0;
  std::vector<KvPart> parts;
};

using StreamSequences = std::vector<std::shared_ptr<const StreamSequence>>;

struct StreamOptions {
  std::int64_t scratch_bytes = std::int64_t{24} << 20;  ///< fetched tiles lie here
  std::int64_t num_slots = 3;    ///< the scratch is a ring of so many slots, one launch each
  std::int64_t num_readers = 4;  ///< threads that call TileSource::read
  bool poison_scratch = false;   ///< fill each slot with NaN before it is used: for tests
};

enum class OnTileError : std::uint8_t {
  raise,   ///< the first failed tile ends the call
  partial  ///< go on, and tell which tiles are missing
};

struct AttendArgs {
  Tensor q;                   ///< [B, num_q_heads, head_dim] or [B, q_len, num_q_heads, head_dim]
  StreamSequences sequences;  ///< [B]
  const State* state = nullptr;  ///< go on from here; nothing: from the empty state
  /// [B]: position of the first query token; empty: length - q_len. A query token sees keys at or
  /// before its position and inside the window.
  std::vector<std::int64_t> q_positions;
  Tensor out;  ///< written only when every tile is in
  std::optional<Tensor> lse;
  OnTileError on_error = OnTileError::raise;
  bool return_state = false;
  /// Called now and then by the thread that attends; what it throws ends the call.
  std::function<void()> poll;
};

struct AttendResult {
  bool complete = true;
  /// Of all tiles that are in; only with return_state or a partial result.
  std::optional<State> state;
  /// [B]: what is missing, to be attended to from `state`; empty when the result is complete.
  StreamSequences missing;
  std::vector<TileError> errors;  ///< one for each missing tile
};

/// What went through one tier.
struct TierStats {
  std::int64_t tiles = 0;
  std::int64_t bytes = 0;
  double seconds = 0;  ///< of copying or reading, summed over threads
};

/// What a StreamingAttention has done since it was made or its statistics were reset.
struct TILEDATTN_API StreamStats {
  std::int64_t calls = 0;
  std::int64_t launches = 0;
  std::int64_t failed_tiles = 0;
  std::int64_t prefetched_launches = 0;  ///< fetched, or begun to be, before their call
  std::int64_t dropped_launches = 0;     ///< prefetched in vain
  double seconds = 0;                    ///< inside attend
  double stall_seconds = 0;              ///< of these, waiting for a source or the link
  TierStats tiers[kNumResidencies];      ///< by Residency
  /// Copies into GPU memory, from whichever tier. Of their launches one in fifteen is timed, and
  /// the others count as equally fast.
  TierStats link;

  /// The share of `seconds` in which a copy into GPU memory was under way.
  double link_use() const { return seconds > 0 ? link.seconds / seconds : 0; }
};

/// What a StreamingAttention keeps for calls to come, as garbage collectors have to know it.
struct Prefetched {
  StreamSequences sequences;
  std::vector<std::pair<const TileSource*, Lease>> leases;
  std::vector<std::exception_ptr> errors;  ///< of tiles that cannot be had
};

/// Attention over KV in host memory, on another GPU or in any TileSource. Tiles of
/// dims.tile_capacity blocks of a sequence pass through a ring of scratch memory and are folded by
/// a TiledAttention in the order of keys: the same bits as the same tiles folded by hand.
///
/// One call at a time: those of other threads wait, those that the thread makes in the middle of
/// its own (in a source or in poll) throw ValueError, but for cancel() and stats(). A process may
/// fork. On the CPU its child can use the object too, unless another thread was in a call of it:
/// then attend() and prefetch() throw ValueError there.
class TILEDATTN_API StreamingAttention {
 public:
  explicit StreamingAttention(const TiledAttentionDims& dims, Device device = default_device(),
                              const ScoreOptions& score = {}, const StreamOptions& options = {});
  /// Waits for the reads and copies under way.
  ~StreamingAttention();
  StreamingAttention(StreamingAttention&&) noexcept;
  StreamingAttention& operator=(StreamingAttention&&) noexcept;

  /// Fold all tiles of the sequences and write the result. Returns when the sources are no longer
  /// read; on a GPU the result is ready in the order of `stream`. Throws TileError, CancelledError
  /// and what TiledAttention::step_tile throws; `out`, `lse` and `state` are then unchanged.
  AttendResult attend(const AttendArgs& args, Stream stream = {});

  /// Begin to fetch for a later attend() to the same sequences with the same q_len and q_positions.
  /// The blocks must have their contents now. False: too many wait already.
  bool prefetch(const StreamSequences& sequences, std::int64_t q_len = 1,
                const std::vector<std::int64_t>& q_positions = {});

  /// Drop what was prefetched. Waits for the reads and copies under way.
  void discard();

  /// What prefetched calls keep alive; nothing while reads are under way, which keep sources alive
  /// too. Not while another thread is in a call of this object.
  Prefetched prefetched() const;

  /// End the attend() that another thread is in, with CancelledError. False when there is none, or
  /// when its tiles are all in: then it ends as if nothing had been said.
  bool cancel();

  const TiledAttentionDims& dims() const;
  Device device() const;
  const StreamOptions& options() const;
  StreamStats stats() const;
  void reset_stats();
  /// Bytes of all buffers on the device.
  std::int64_t nbytes() const;

 private:
  struct Impl;
  struct Running;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tiledattn
