// SPDX-License-Identifier: Apache-2.0
// The loads of one warp: K and V of its chunks go, one after the other, through two slots in shared
// memory that only this warp uses. They run ahead over the borders of groups and sequences.
//
// The keys of a slot stand in rows of 128 bytes (64 for 64 columns of a byte each; TMA's swizzle of
// as many), all keys of the first 128 bytes, then all keys of the next ones, and so on. A box is
// box_tokens rows of one such slab, so that it lies in one block of the pool; each lane loads at
// most one box of a chunk and keeps its block id one chunk ahead.
#pragma once

#include <cstdint>

#include "common/cp_async.cuh"
#include "common/faults.cuh"
#include "common/mbarrier.cuh"
#include "common/tma.cuh"
#include "decode/decode_sm90_scales.cuh"
#include "decode/decode_sm90_work.cuh"

namespace tiledattn::cuda {

/// One lane's box of one chunk.
struct ChunkLoad {
  bool exists = false;           ///< the chunk: the same in every lane
  bool inside = false;           ///< the box holds a visible key
  std::uint32_t block = 0;       ///< as in the table, not yet checked
  std::uint32_t block_high = 0;  ///< the upper half of an int64
  int token = 0;
  int kv_head = 0;
  int seq = 0;
};

/// Where the loads of a warp stand, in shared memory: registers are short, and this is needed once
/// for each chunk.
struct LoadCursor {
  Cursor at;
  int chunk;  ///< of the slice in the group
  int chunk_end;
};

/// Tells the host what is wrong with the lengths or positions of a sequence. Not inlined, since it
/// is rare.
__device__ __noinline__ static void report_sequence(const AttentionProblem& p, int seq) {
  record_fault(p.faults, check_sequence(p, seq));
}

/// For a sequence with a block id outside the pool: the first one, so that what the host reads does
/// not hang on who saw which. Not inlined, since it is rare.
__device__ __noinline__ static void report_blocks(const AttentionProblem& p, int seq) {
  const Sequence s = sequence_at(p, seq);
  const KeyRange columns = table_columns(p, s);
  for (std::int64_t column = columns.begin; column < columns.end; ++column) {
    const Fault fault = check_block(p, s, column);
    if (fault.found()) return record_fault(p.faults, fault);
  }
}

/// Brings the queries of a head near, which from memory would come late: 128 bytes for each lane.
template <typename Config>
__device__ __forceinline__ void prefetch_queries(const DecodeSm90Params& params,
                                                 const GroupPlace& at) {
  constexpr int kLines = (Config::kDim + 63) / 64;  // of a row
  static_assert(Config::kTiles * 8 * kLines <= kWarpSize);
  const AttentionProblem& p = params.problem;
  const int kv_head = params.row_tiles.divide(at.head);
  const int row_tile = at.head - kv_head * static_cast<int>(params.row_tiles.value);
  const int row = row_tile * Config::kTiles * 8 + lane_index() / kLines;
  if (lane_index() >= Config::kTiles * 8 * kLines || row >= params.rows) return;
  const int token = params.group.divide(row);
  const int group = static_cast<int>(params.group.value);
  const int head = kv_head * group + row - token * group;
  const auto* const q = static_cast<const std::uint16_t*>(p.q.data) + at.seq * p.q.seq_stride +
                        token * p.q.token_stride + head * p.q.head_stride;
  const int column = lane_index() % kLines * 64;
  if (column < p.head_dim) asm volatile("prefetch.global.L2 [%0];" ::"l"(q + column));
}

template <typename Config>
class RingLoads {
 public:
  static constexpr int kKeys = 0;  ///< slots
  static constexpr int kValues = 1;
  static constexpr int kRowBytes = Config::kRowBytes;
  static constexpr bool kScales = kQuantized<typename Config::Element>;
  /// Where sums fill the registers, a call amid them would move some to memory.
  static constexpr bool kInlineKeys = Config::kTiles > 1 || Config::kDim > 192;

  /// Starts the loads of the first chunk, before the kernel before this one is done where that is
  /// allowed. `cursor`, `ring`, `full` and `scales` are the warp's own.
  __device__ __forceinline__ RingLoads(const DecodeSm90Params& params, const DecodeSm90Params& copy,
                                       const Cursor& first, int warp_in_team, LoadCursor& cursor,
                                       unsigned char* ring, MBarrier* full,
                                       WarpScales<Config>& scales)
      : copy_(copy),
        warp_(warp_in_team),
        cursor_(cursor),
        ring_(ring),
        full_(full),
        scales_(scales) {
    const int boxes = Config::kChunkKeys / params.box_tokens;
    const int slab = lane_index() / boxes;
    const int token = lane_index() % boxes * params.box_tokens;
    first_token_ = slab < Config::kSlabs ? token : -1;
    first_column_ = slab * Config::kSlabColumns;
    offset_ = slab * Config::kSlabBytes + token * kRowBytes;
    if (lane_index() == 0) {
      ChunkRange slice;
      if (!first.done()) slice = slice_of_group(first.num_chunks(), warp_in_team);
      cursor = {first, slice.begin, slice.end};
    }
    __syncwarp();
    if (!is_old(params)) wait_for_predecessor();
#pragma unroll 1
    for (int ahead = 0; ahead < 3; ++ahead) {  // chunks
      next_ = fetch(params);
      if (ahead < 2) current_ = next_;
      if (!next_.exists) break;
      if (ahead > 0) continue;
      issue<kKeys>(params);
      issue_scales(params, 0);
      issue<kValues>(params);
      if (warp_ == 0) prefetch_queries<Config>(params, first);
    }
  }

  /// Starts the load of K or V of the next chunk, where the warp has read the one before it. Called
  /// by the whole warp.
  template <int kSlot>
  __device__ __forceinline__ void issue(const DecodeSm90Params& params) {
    if (!current_.exists) return;
    const bool good = has_good_box(params);
    const int boxes = __popc(__ballot_sync(kAllLanes, good));
    if (lane_index() == 0) full_[kSlot].arrive_expecting(boxes * params.box_tokens * kRowBytes);
    __syncwarp();
    if (good) {
      unsigned char* const to = ring_ + kSlot * Config::kSlotBytes + offset_;
      const CUtensorMap& map = kSlot == kKeys ? params.k_map : params.v_map;
      const BoxAt box{first_column_, current_.token, current_.kv_head,
                      static_cast<int>(current_.block)};
      if (Config::kRows <= 8 || params.reads_once) {
        load_box_once(to, map, box, full_[kSlot]);
      } else {
        load_box(to, map, box, full_[kSlot]);
      }
    }
    if (kSlot == kKeys) return;
    const bool bad = current_.inside && !good;
    wrong_ = __any_sync(kAllLanes, bad);
    if (bad && wrong_seq_ < 0) wrong_seq_ = current_.seq;
  }

  /// Starts the copies of the scales of the next chunk to `slot`, where keys have their own. Once
  /// between issue<kKeys> and issue<kValues>; all is one group of copies for each chunk.
  __device__ __forceinline__ void issue_scales(const DecodeSm90Params& params, std::uint32_t slot) {
    if constexpr (kScales) {
      const ScaleView& k = params.problem.k_scale;
      const ScaleView& v = params.problem.v_scale;
      if (!k.by_key && !v.by_key) return;
      if (current_.exists) {
        const unsigned good = __ballot_sync(kAllLanes, has_good_box(params));
        if (k.by_key) copy_scales(k, params.box_tokens, good, scales_.k[slot]);
        if (v.by_key) copy_scales(v, params.box_tokens, good, scales_.v[slot]);
      }
      end_copy_group();
    }
  }

  /// Returns once the scales of the chunk before the one last issued are there. Those of keys that
  /// nobody sees may be anything.
  __device__ __forceinline__ void wait_for_scales(const DecodeSm90Params& params) const {
    if constexpr (kScales) {
      if (!params.problem.k_scale.by_key && !params.problem.v_scale.by_key) return;
      wait_copy_groups<1>();
      __syncwarp();
    }
  }

  /// Goes on to the next chunk, once both loads of one have been started.
  __device__ __forceinline__ void look_ahead(const DecodeSm90Params& params) {
    if (!current_.exists) return;
    current_ = next_;
    next_ = fetch(params);
  }

  /// Tells the host of a wrong block id that a load came upon; after the last one.
  __device__ __forceinline__ void report(const DecodeSm90Params& params) const {
    if (wrong_seq_ >= 0) report_blocks(params.problem, wrong_seq_);
  }

  /// The chunk in the slots has a block id outside the pool. Asked before its V is replaced.
  __device__ bool wrong() const { return wrong_; }

 private:
  /// The first chunk has none of the new keys, which the kernel before may have written. They are
  /// the last ones that a query sees: a tile with positions may hold slots beyond.
  __device__ __forceinline__ bool is_old(const DecodeSm90Params& params) const {
    const SequenceWork& work = cursor_.at.work;
    return begins_with_old_keys(work.cut, cursor_.at.group, {cursor_.chunk, cursor_.chunk_end},
                                Config::kChunkKeys, work.end, params.problem.q_len);
  }

  __device__ __forceinline__ bool has_good_box(const DecodeSm90Params& params) const {
    return current_.inside && current_.block_high == 0 &&
           current_.block < static_cast<std::uint32_t>(params.num_blocks);
  }

  /// Copies the scale of each key in a good box. The first lanes hold the boxes, in their order.
  __device__ __forceinline__ void copy_scales(const ScaleView& scale, int box_tokens,
                                              unsigned good_boxes, float* to) const {
#pragma unroll
    for (int first = 0; first < Config::kChunkKeys; first += kWarpSize) {
      const int key = first + lane_index();
      const int box = key >> (__ffs(box_tokens) - 1);  // box_tokens is a power of two
      const int token = __shfl_sync(kAllLanes, current_.token, box) + key % box_tokens;
      const std::uint32_t block = __shfl_sync(kAllLanes, current_.block, box);
      if ((good_boxes >> box & 1) == 0) continue;
      copy_float_async(shared_address(to + key), scale.data + block * scale.block_stride +
                                                     token * scale.token_stride +
                                                     current_.kv_head * scale.head_stride);
    }
  }

  /// This lane's box of the next chunk of the warp's slices. Called by the whole warp.
  __device__ __forceinline__ ChunkLoad fetch(const DecodeSm90Params& params) {
    ChunkLoad load;
    int chunk = cursor_.chunk;
    if (chunk >= cursor_.chunk_end && !next_slice(params)) return load;
    chunk = cursor_.chunk;
    __syncwarp();
    if (lane_index() == 0) cursor_.chunk = chunk + 1;

    const AttentionProblem& p = params.problem;
    const Cursor& at = cursor_.at;
    const int key = (at.work.cut.first_chunk + at.group * at.work.cut.group_chunks + chunk) *
                        Config::kChunkKeys +
                    first_token_;
    load.exists = true;
    load.inside = first_token_ >= 0 && key < at.work.end && key + params.box_tokens > at.work.begin;
    load.kv_head = params.row_tiles.divide(at.head);
    load.seq = at.seq;
    load.token = key;
    load.block = static_cast<std::uint32_t>(load.seq);
    if (p.table.given() && load.inside) {
      const int column = params.block_size.divide(key);
      load.token = key - column * static_cast<int>(params.block_size.value);
      // As raw words: a conversion would wait for the load.
      const std::int64_t entry = load.seq * p.table.row_stride + column * p.table.column_stride;
      const auto* const words = static_cast<const std::uint32_t*>(p.table.data);
      if (p.table.is_int64) {
        load.block = __ldg(words + 2 * entry);
        load.block_high = __ldg(words + 2 * entry + 1);
      } else {
        load.block = __ldg(words + entry);
      }
    }
    __syncwarp();
    return load;
  }

  /// Moves the cursor to the next slice with a chunk; false where there is none.
  __device__ __forceinline__ bool next_slice(const DecodeSm90Params& params) {
    Cursor at = cursor_.at;
    ChunkRange slice;
#pragma unroll 1
    while (slice.begin >= slice.end && !at.done()) {
      if (at.advance(params, at.work.cut))
        at.work = sequence_work<Config::kChunkKeys, kInlineKeys>(params, copy_, at.seq);
      if (warp_ == 0 && at.group == 0 && !at.done()) prefetch_queries<Config>(params, at);
      if (!at.done()) slice = slice_of_group(at.num_chunks(), warp_);
    }
    __syncwarp();
    if (lane_index() == 0) cursor_ = {at, slice.begin, slice.end};
    __syncwarp();
    return slice.begin < slice.end;
  }

  const DecodeSm90Params& copy_;  ///< see sequence_work()
  int warp_;
  LoadCursor& cursor_;
  unsigned char* ring_;
  MBarrier* full_;
  WarpScales<Config>& scales_;
  int first_token_;
  int first_column_;
  int offset_;
  bool wrong_ = false;
  int wrong_seq_ = -1;  ///< the first sequence with a wrong block id
  ChunkLoad current_;   ///< the next one to load
  ChunkLoad next_;
};

}  // namespace tiledattn::cuda
