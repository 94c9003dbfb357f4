// SPDX-License-Identifier: Apache-2.0
// Prefill on Hopper: one block for each SM takes tiles of query rows until none is left.
//
// Of warpgroup 0, one thread finds work, one brings q, K and V into shared memory by TMA, and one
// warp clears what packed values have behind their end. The other warpgroups are consumers: each
// owns 64 rows of the tile, with scores, weights and output in registers. In step n a consumer
// issues the scores of key tile n and, behind them, the product of tile n + 1's weights with its
// values; while that runs, it makes tile n's weights. Key tiles go from the last to the first, so
// that masked ones come first. docs/kernels/forward.md draws it.
#pragma once

#include <cstdint>

#include "common/finish_row.cuh"
#include "common/launch.cuh"
#include "common/mbarrier.cuh"
#include "common/softmax_state.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "prefill/prefill_sm90.h"
#include "prefill/prefill_sm90_softmax.cuh"
#include "prefill/prefill_sm90_work.cuh"

namespace tiledattn::cuda {

/// Work is found one tile ahead. More would leave some blocks with several tiles at the end while
/// others have none.
constexpr unsigned kWorkPlaces = 2;

template <typename Config>
struct alignas(1024) PrefillSm90Shared {
  using T = typename Config::T;
  static constexpr int kKeyTile = Config::kKeys * Config::kSlabs * kSlabColumns;
  static constexpr int kRowTile = Config::kRows * Config::kSlabs * kSlabColumns;
  T v[Config::kStages][kKeyTile];
  T k[Config::kStages][kKeyTile];
  T q[Config::kQueryPlaces][kRowTile];
  T out[Config::kOwnOutput ? kRowTile : 8];
  float anchors[4 * Config::kConsumers];
  WorkTile work[kWorkPlaces];
  int repeat[kWorkPlaces];  ///< set by consumers: the tile must be done again
  MBarrier q_full[Config::kQueryPlaces];
  MBarrier q_empty[Config::kQueryPlaces];
  MBarrier k_full[Config::kStages];
  MBarrier k_empty[Config::kStages];
  MBarrier v_full[Config::kStages];
  MBarrier v_tail[Config::kStages];  ///< values are there, but some must be cleared
  MBarrier v_empty[Config::kStages];
  MBarrier work_full[kWorkPlaces];
  MBarrier work_empty[kWorkPlaces];

  __device__ void init_barriers(bool packed) {
    constexpr int kWarps = 4 * Config::kConsumers;  // each warp says for itself that it is done
    for (unsigned i = 0; i < Config::kQueryPlaces; ++i) {
      q_full[i].init(1);
      q_empty[i].init(kWarps);
    }
    for (unsigned i = 0; i < Config::kStages; ++i) {
      k_full[i].init(1);
      k_empty[i].init(kWarps);
      v_full[i].init(1);
      v_tail[i].init(1);
      v_empty[i].init(kWarps);
    }
    for (unsigned i = 0; i < kWorkPlaces; ++i) {
      work_full[i].init(1);
      work_empty[i].init(kWarps + (packed ? 2 : 1));  // and those that load and clear
      repeat[i] = 0;
    }
    fence_barrier_init();
  }
};

/// A place in a ring of barriers and the parity of its phase, in one register. kPlaces is a power
/// of two.
template <unsigned kPlaces>
struct RingPlace {
  unsigned steps = 0;
  __device__ __forceinline__ unsigned index() const { return steps % kPlaces; }
  __device__ __forceinline__ unsigned parity() const { return steps / kPlaces % 2; }
  __device__ __forceinline__ void advance() { ++steps; }
};

// Numbered barriers of a block; 0 is __syncthreads().
constexpr int kFirstTurnBarrier = 1;
constexpr int kFirstOutputBarrier = 4;

/// One thread: takes the next tile of rows when a place is free.
template <typename Config>
__device__ __forceinline__ void find_all_work(const PrefillSm90Params& params,
                                              PrefillSm90Shared<Config>& shared) {
  // Takes back what consumers have asked for at a place, which they have left.
  const auto take_repeat = [&](unsigned place) {
    if (shared.repeat[place] == 0) return false;
    shared.repeat[place] = 0;
    return true;
  };
  std::int32_t index = static_cast<std::int32_t>(blockIdx.x);
  bool paused = false;
  for (RingPlace<kWorkPlaces> place;; place.advance()) {
    WorkTile& work = shared.work[place.index()];
    shared.work_empty[place.index()].wait(place.parity() ^ 1);
    if (take_repeat(place.index())) {
      work.repeat();
    } else {
      work = find_work<Config>(params, index);
      if (!work.none()) {
        index = static_cast<std::int32_t>(gridDim.x) + atomicAdd(params.counters, 1);
      } else if (!paused) {
        // The tile at the other place may have to be repeated, which only its end will tell.
        work.head = WorkTile::kPause;
      }
    }
    paused = work.pause();
    const bool none = work.none();
    shared.work_full[place.index()].arrive();
    if (none) break;
  }
  // The last block leaves the counters as it found them.
  __threadfence();
  if (atomicAdd(params.counters + 1, 1) == static_cast<std::int32_t>(gridDim.x) - 1) {
    params.counters[0] = 0;
    params.counters[1] = 0;
  }
}

template <typename Config>
__device__ __forceinline__ void load_keys(typename Config::T* to, const CUtensorMap& map,
                                          MBarrier& full, MBarrier& empty, unsigned parity,
                                          const WorkTile& work, int tile) {
  empty.wait(parity ^ 1);
  full.arrive_expecting(PrefillSm90Shared<Config>::kKeyTile * sizeof(typename Config::T));
#pragma unroll
  for (int slab = 0; slab < Config::kSlabs; ++slab) {
    load_box(to + slab * Config::kKeys * kSlabColumns, map,
             {slab * kSlabColumns, work.key_row + tile * Config::kKeys, work.kv_head, work.batch},
             full);
  }
}

/// One thread: q, and the key tiles from the last to the first, each one's keys ahead of the values
/// of the tile before.
template <typename Config>
__device__ __forceinline__ void load_all(const PrefillSm90Params& params,
                                         PrefillSm90Shared<Config>& shared) {
  using T = typename Config::T;
  RingPlace<Config::kStages> keys;
  RingPlace<Config::kStages> values;
  RingPlace<Config::kQueryPlaces> queries;
  const auto load_k = [&](const WorkTile& work, int tile) {
    const unsigned i = keys.index();
    load_keys<Config>(shared.k[i], params.k, shared.k_full[i], shared.k_empty[i], keys.parity(),
                      work, tile);
    keys.advance();
  };
  const auto load_v = [&](const WorkTile& work, int tile) {
    const unsigned i = values.index();
    const bool tail = tile == work.end - 1 && work.needs_clearing;
    load_keys<Config>(shared.v[i], params.v, tail ? shared.v_tail[i] : shared.v_full[i],
                      shared.v_empty[i], values.parity(), work, tile);
    values.advance();
  };
  for (RingPlace<kWorkPlaces> place;; place.advance()) {
    shared.work_full[place.index()].wait(place.parity());
    const WorkTile& work = shared.work[place.index()];
    if (work.none()) break;
    if (!work.pause()) {
      int tile = work.end - 1;
      if (work.has_keys()) load_k(work, tile);
      MBarrier& q_full = shared.q_full[queries.index()];
      shared.q_empty[queries.index()].wait(queries.parity() ^ 1);
      q_full.arrive_expecting(PrefillSm90Shared<Config>::kRowTile * sizeof(T));
#pragma unroll
      for (int slab = 0; slab < Config::kSlabs; ++slab) {
        load_box(shared.q[queries.index()] + slab * Config::kRows * kSlabColumns, params.q,
                 {slab * kSlabColumns, work.q_row, work.head, work.batch}, q_full);
      }
      queries.advance();
#pragma unroll 1
      for (; tile > work.begin; --tile) {
        load_k(work, tile - 1);
        load_v(work, tile);
      }
      if (work.has_keys()) load_v(work, tile);
    }
    shared.work_empty[place.index()].arrive();
  }
}

/// One warp, for packed KV: values past a sequence's last key are the next one's, and 0 * NaN would
/// let them in. It clears them, then says for the loader that the tile is full. (Consumers could do
/// so, but a branch there makes ptxas forget that places in rings, and with them the descriptors of
/// matrix products, are the same for all threads.)
template <typename Config>
__device__ __forceinline__ void clear_all(PrefillSm90Shared<Config>& shared) {
  constexpr int kRowPieces = kSlabRowBytes / 16 * Config::kSlabs;
  const int lane = static_cast<int>(threadIdx.x % 32u);
  RingPlace<Config::kStages> values;
  unsigned tail_parities = 0;  // a bit for each stage
  for (RingPlace<kWorkPlaces> place;; place.advance()) {
    shared.work_full[place.index()].wait(place.parity());
    const WorkTile& work = shared.work[place.index()];
    if (work.none()) break;
    if (work.needs_clearing) {
      const unsigned stage = values.index();
      shared.v_tail[stage].wait(tail_parities >> stage & 1);
      tail_parities ^= 1u << stage;
      char* const tile = reinterpret_cast<char*>(shared.v[stage]);
      const int first_row = work.num_keys - (work.end - 1) * Config::kKeys;
#pragma unroll 1
      for (int i = first_row * kRowPieces + lane; i < Config::kKeys * kRowPieces; i += 32) {
        const int row = i / kRowPieces;
        const int piece = i % kRowPieces;
        char* const at = tile + (piece / 8 * Config::kKeys + row) * kSlabRowBytes + piece % 8 * 16;
        *reinterpret_cast<uint4*>(at) = uint4{0, 0, 0, 0};
      }
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) shared.v_full[stage].arrive();
    }
    values.steps += static_cast<unsigned>(work.end - work.begin);
    __syncwarp();
    if (lane == 0) shared.work_empty[place.index()].arrive();
  }
}

/// A warpgroup's 64 rows of a tile.
template <typename Config>
class Consumer {
 public:
  using T = typename Config::T;
  using Shared = PrefillSm90Shared<Config>;

  __device__ __forceinline__ Consumer(const PrefillSm90Params& params, Shared& shared, int index)
      : params_(params),
        shared_(shared),
        index_(index),
        row_(index * kWgmmaRows + warp_row() + lane() / 4),
        first_q_(
            computed_here(k_major_descriptor(shared.q[0] + index * kWgmmaRows * kSlabColumns))),
        q_(first_q_),
        k_(computed_here(k_major_descriptor(shared.k[0]))),
        v_(computed_here(mn_major_descriptor(shared.v[0], Config::kKeys * kSlabRowBytes))) {}

  __device__ __forceinline__ void run() {
    if (Config::kTurns && index_ == 0) named_barrier_arrive(kFirstTurnBarrier, kTurnThreads);
    float out[kOutputs];
    std::uint32_t weights[kScores / 2];
    RowPair rows;
    bool begun = false;  // the weights of the tile's first keys are there
    for (;;) {
      shared_.work_full[place_.index()].wait(place_.parity());
      const WorkTile& work = shared_.work[place_.index()];
      const int head = work.head;
      if (head == WorkTile::kNone) break;
      RingPlace<kWorkPlaces> next_place = place_;
      next_place.advance();
      RowPair next_rows;
      bool next_begun = false;
      bool huge = false;
      if (head != WorkTile::kPause) {
#pragma unroll
        for (int i = 0; i < kOutputs; ++i) out[i] = 0.0f;
        const int rows_left = work.num_rows - row_;
        if (work.has_keys()) {
          if (!begun) begin(weights, rows, work);
          walk(out, weights, rows, work);
          leave_queries();
          if constexpr (Config::kQueryPlaces > 1) {
            shared_.work_full[next_place.index()].wait(next_place.parity());
            const WorkTile& next = shared_.work[next_place.index()];
            next_begun = next.has_keys();
            if (next_begun) change_tile(out, weights, next_rows, next);
          }
          if (!next_begun) end(out, weights, rows);
        } else {
          shared_.q_full[query_.index()].wait(query_.parity());
          leave_queries();
        }
        finish(out, rows, work, rows_left);
        // What lies behind the sequence must not decide this.
        huge = (rows.huge[0] && rows_left > 0) || (rows.huge[1] && rows_left > 8);
      }
      const bool any_huge = __any_sync(kAllLanes, huge);
      __syncwarp();  // every lane has read what it needs of the work
      if (lane() == 0) {
        if (any_huge) shared_.repeat[place_.index()] = 1;
        shared_.work_empty[place_.index()].arrive();
      }
      place_ = next_place;
      rows = next_rows;
      begun = next_begun;
    }
    if (is_first_thread()) wait_for_stores();
  }

 private:
  static constexpr int kTurnThreads = 2 * kWarpgroupSize;
  static constexpr int kScores = Config::kKeys / 2;  ///< of a thread
  static constexpr int kOutputs = Config::kDim / 2;

  // Unsigned, so that the compiler need not think of negative threads.
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32u); }
  /// The warp's first of the warpgroup's rows.
  static __device__ __forceinline__ int warp_row() {
    return static_cast<int>(threadIdx.x % 128u / 32u * 16u);
  }
  static __device__ __forceinline__ bool is_first_thread() { return threadIdx.x % 128u == 0; }
  /// The warp is done with what the barrier guards.
  __device__ __forceinline__ static void release(MBarrier& barrier) {
    if (lane() == 0) barrier.arrive();
  }

  /// Done with the current tile of q: on to the next.
  __device__ __forceinline__ void leave_queries() {
    release(shared_.q_empty[query_.index()]);
    query_.advance();
    constexpr int kTileBytes = Shared::kRowTile * sizeof(T);
    q_ = computed_here(first_q_.moved(static_cast<int>(query_.index()) * kTileBytes));
  }

  /// Of the current tile of rows and the current tile of keys.
  __device__ __forceinline__ void issue_scores(float (&scores)[kScores]) const {
    constexpr int kTileBytes = Shared::kKeyTile * sizeof(T);
    const MatrixDescriptor keys = k_.moved(static_cast<int>(stage_.index()) * kTileBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Config::kDim / kWgmmaDepth; ++i) {
      constexpr int kPieces = kSlabColumns / kWgmmaDepth;
      const int slab = i / kPieces;
      const int inside = i % kPieces * kWgmmaDepth * static_cast<int>(sizeof(T));
      WgmmaShared<T, Config::kKeys>::issue(
          scores, q_.moved(slab * Config::kRows * kSlabRowBytes + inside).bits(),
          keys.moved(slab * Config::kKeys * kSlabRowBytes + inside).bits(), i != 0);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void issue_output(float (&out)[kOutputs],
                                               std::uint32_t (&weights)[kScores / 2],
                                               unsigned stage) const {
    constexpr int kTileBytes = Shared::kKeyTile * sizeof(T);
    const MatrixDescriptor values = v_.moved(static_cast<int>(stage) * kTileBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Config::kKeys / kWgmmaDepth; ++i) {
      WgmmaRegisters<T, Config::kDim>::issue(out, weights[4 * i], weights[4 * i + 1],
                                             weights[4 * i + 2], weights[4 * i + 3],
                                             values.moved(i * kWgmmaDepth * kSlabRowBytes).bits());
    }
    wgmma_commit();
  }

  /// Accumulators of scores are, once rounded and packed, the A operand of the next product.
  __device__ __forceinline__ static void pack(std::uint32_t (&weights)[kScores / 2],
                                              const float (&scores)[kScores]) {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i)
      weights[i] = pack_pair<T>(scores[2 * i], scores[2 * i + 1]);
  }

  __device__ __forceinline__ static void scale_output(float (&out)[kOutputs],
                                                      const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) out[i] *= factor[i % 4 / 2];
  }

  /// Which columns of key tile `tile` the thread's rows see.
  __device__ __forceinline__ void mask(float (&scores)[kScores], const WorkTile& work,
                                       int tile) const {
    const int first_column = tile * Config::kKeys + lane() % 4 * 2;
    int begin[2];
    int end[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      begin[r] = work.see_begin + row_ + 8 * r - first_column;
      end[r] = min(work.num_keys, work.see_end + row_ + 8 * r) - first_column;
    }
    mask_scores<Config::kGeneral>(scores, begin, end);
  }

  __device__ __forceinline__ void take_turn() const {
    if (Config::kTurns) named_barrier_sync(kFirstTurnBarrier + index_, kTurnThreads);
  }
  __device__ __forceinline__ void pass_turn() const {
    if (!Config::kTurns) return;
    const int next = index_ + 1 == Config::kConsumers ? 0 : index_ + 1;
    named_barrier_arrive(kFirstTurnBarrier + next, kTurnThreads);
  }

  /// Holds exponentials in front of what follows.
  __device__ __forceinline__ void anchor(const RowPair& rows) const {
    if (Config::kAnchoredRows == 0 || lane() != 0) return;
    const unsigned warp = threadIdx.x / 32u - 4u;
    const float sums = Config::kAnchoredRows == 1 ? rows.l[0] : rows.l[0] + rows.l[1];
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(shared_address(&shared_.anchors[warp])), "f"(sums)
                 : "memory");
  }

  /// Weights of the first tile of keys of `work`, whose scores have been made.
  __device__ __forceinline__ void make_first_weights(float (&scores)[kScores], RowPair& rows,
                                                     const WorkTile& work) const {
    if (Config::kGeneral) transform_scores(scores, params_);
    mask(scores, work, work.end - 1);
    make_weights<true>(scores, rows, params_.log2_scale);
    rows.rescale[0] = rows.rescale[1] = 1.0f;  // there is no output yet
  }

  /// The first tile of keys, with nothing to overlap it.
  __device__ __forceinline__ void begin(std::uint32_t (&weights)[kScores / 2], RowPair& rows,
                                        const WorkTile& work) {
    float scores[kScores];
    shared_.q_full[query_.index()].wait(query_.parity());
    shared_.k_full[stage_.index()].wait(stage_.parity());
    issue_scores(scores);
    wgmma_wait<0>();
    release(shared_.k_empty[stage_.index()]);
    make_first_weights(scores, rows, work);
    pack(weights, scores);
  }

  /// The last product, with nothing to overlap it.
  __device__ __forceinline__ void end(float (&out)[kOutputs], std::uint32_t (&weights)[kScores / 2],
                                      const RowPair& rows) {
    if (Config::kLateRescale && rows.must_rescale()) scale_output(out, rows.rescale);
    shared_.v_full[stage_.index()].wait(stage_.parity());
    issue_output(out, weights, stage_.index());
    wgmma_wait<0>();
    release(shared_.v_empty[stage_.index()]);
    stage_.advance();
  }

  /// Both in one: the last product of one tile of rows, the first weights of the next.
  __device__ __forceinline__ void change_tile(float (&out)[kOutputs],
                                              std::uint32_t (&weights)[kScores / 2],
                                              RowPair& next_rows, const WorkTile& next) {
    const RingPlace<Config::kStages> last = stage_;
    stage_.advance();
    float scores[kScores];
    shared_.q_full[query_.index()].wait(query_.parity());
    shared_.k_full[stage_.index()].wait(stage_.parity());
    take_turn();
    issue_scores(scores);
    shared_.v_full[last.index()].wait(last.parity());
    issue_output(out, weights, last.index());
    pass_turn();
    wgmma_wait<1>();
    release(shared_.k_empty[stage_.index()]);
    make_first_weights(scores, next_rows, next);
    anchor(next_rows);
    wgmma_wait<0>();
    release(shared_.v_empty[last.index()]);
    pack(weights, scores);
  }

  template <bool kMasked>
  __device__ __forceinline__ void step(float (&out)[kOutputs],
                                       std::uint32_t (&weights)[kScores / 2], RowPair& rows,
                                       const WorkTile& work, int tile) {
    const RingPlace<Config::kStages> last = stage_;
    stage_.advance();
    float scores[kScores];
    shared_.k_full[stage_.index()].wait(stage_.parity());
    take_turn();
    issue_scores(scores);
    if (Config::kLateRescale && rows.must_rescale()) scale_output(out, rows.rescale);
    shared_.v_full[last.index()].wait(last.parity());
    issue_output(out, weights, last.index());
    pass_turn();
    wgmma_wait<1>();
    release(shared_.k_empty[stage_.index()]);
    if (Config::kGeneral) transform_scores(scores, params_);
    if (kMasked) mask(scores, work, tile);
    if constexpr (Config::kLagged && !kMasked) {
      make_lagged_weights(scores, rows, params_.log2_scale);
    } else {
      make_weights<kMasked>(scores, rows, params_.log2_scale);
    }
    anchor(rows);
    wgmma_wait<0>();
    release(shared_.v_empty[last.index()]);
    pack(weights, scores);
    if (!Config::kLateRescale && rows.must_rescale()) scale_output(out, rows.rescale);
  }

  /// All tiles of keys behind the first.
  __device__ __forceinline__ void walk(float (&out)[kOutputs],
                                       std::uint32_t (&weights)[kScores / 2], RowPair& rows,
                                       const WorkTile& work) {
    const int begin = work.begin;
    const int full_begin = work.full_begin;
    const int full_end = work.full_end;
    int tile = work.end - 2;
#pragma unroll 1
    for (; tile >= full_end; --tile) step<true>(out, weights, rows, work, tile);
    if (tile >= full_begin) {
      rows.note_size(params_.log2_scale);
#pragma unroll 1
      for (; tile >= full_begin; --tile) step<false>(out, weights, rows, work, tile);
      rows.note_size(params_.log2_scale);
    }
    if constexpr (Config::kGeneral) {
#pragma unroll 1
      for (; tile >= begin; --tile) step<true>(out, weights, rows, work, tile);
    }
  }

  /// Sums, lse, and the output on its way.
  __device__ __forceinline__ void finish(float (&out)[kOutputs], const RowPair& rows,
                                         const WorkTile& work, int rows_left) {
    const AttentionProblem& p = params_.attend.problem;
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = rows.l[r] * rows.owed[r];
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      const RowResult result(rows.m[r] * params_.natural_scale, sum,
                             p.sinks == nullptr ? nullptr : p.sinks + work.head);
      factor[r] = result.sum == 0.0f ? 0.0f : rows.owed[r] * __fdividef(result.scale, result.sum);
      if (p.out.lse != nullptr && lane() % 4 == 0 && rows_left > 8 * r) {
        p.out.lse[p.out.lse_offset(work.batch, work.q_row + row_ + 8 * r, work.head)] = result.lse;
      }
    }
    scale_output(out, factor);
    if (params_.float_output) {
      store_floats(out, work, rows_left);
    } else if constexpr (Config::kOwnOutput) {
      store_tile(out, work);
    } else {
      store_pieces(out, work, rows_left);
    }
  }

  /// Straight from the registers.
  __device__ __forceinline__ void store_floats(const float (&out)[kOutputs], const WorkTile& work,
                                               int rows_left) const {
    const AttentionProblem& p = params_.attend.problem;
    const int head_dim_v = static_cast<int>(p.head_dim_v);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (rows_left <= 8 * r) continue;
      float* const to = static_cast<float*>(p.out.data) +
                        p.out.row_offset(work.batch, work.q_row + row_ + 8 * r, work.head);
#pragma unroll
      for (int j = 0; j < kOutputs / 4; ++j) {
        const int column = 8 * j + lane() % 4 * 2;  // head_dim_v is even
        if (column >= head_dim_v) continue;
        to[column] = out[4 * j + 2 * r];
        to[column + 1] = out[4 * j + 2 * r + 1];
      }
    }
  }

  /// Straight from the registers, 16 bytes a thread: the four threads of a row exchange what they
  /// hold of 32 columns, so that each has 8 neighbours.
  __device__ __forceinline__ void store_pieces(const float (&out)[kOutputs], const WorkTile& work,
                                               int rows_left) const {
    const AttentionProblem& p = params_.attend.problem;
    const int head_dim_v = static_cast<int>(p.head_dim_v);  // a multiple of 8
    const int quarter = lane() % 4;
    const bool odd = quarter % 2 != 0;
    const bool high = quarter / 2 != 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      T* const to = static_cast<T*>(p.out.data) +
                    p.out.row_offset(work.batch, work.q_row + row_ + 8 * r, work.head);
#pragma unroll
      for (int block = 0; block < kOutputs / 16; ++block) {
        std::uint32_t pair[4];  // [i]: columns 8i + 2 * quarter of the block
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = 4 * (4 * block + i) + 2 * r;
          pair[i] = pack_pair<T>(out[at], out[at + 1]);
        }
        // A transposition of 4 x 4 over the threads of the row, in two exchanges.
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          const std::uint32_t got = __shfl_xor_sync(kAllLanes, odd ? pair[i] : pair[i + 1], 1);
          pair[i] = odd ? got : pair[i];
          pair[i + 1] = odd ? pair[i + 1] : got;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const std::uint32_t got = __shfl_xor_sync(kAllLanes, high ? pair[i] : pair[i + 2], 2);
          pair[i] = high ? got : pair[i];
          pair[i + 2] = high ? pair[i + 2] : got;
        }
        const int column = 32 * block + 8 * quarter;
        if (rows_left > 8 * r && column < head_dim_v)
          *reinterpret_cast<uint4*>(to + column) = uint4{pair[0], pair[1], pair[2], pair[3]};
      }
    }
  }

  /// Through shared memory: by TMA, which writes nothing outside the array, or row by row where the
  /// rows behind the tile's are another sequence's.
  __device__ __forceinline__ void store_tile(const float (&out)[kOutputs], const WorkTile& work) {
    T* const slabs = shared_.out + index_ * kWgmmaRows * kSlabColumns;
    constexpr int kSlab = Config::kRows * kSlabColumns;
    if (is_first_thread()) {
      // The same rows, written a second time, must arrive after the first.
      if (work.again) {
        wait_for_stores();
      } else {
        wait_for_reads_of_stores();
      }
    }
    barrier();
    const unsigned lane = computed_here(threadIdx.x % 32u);
    const std::uint32_t row_address =
        shared_address(slabs) + (warp_row() + lane % 16) * kSlabRowBytes;
#pragma unroll
    for (int j = 0; j < kOutputs / 8; ++j) {  // 16 columns each
      const unsigned piece = 2 * j + lane / 16;
      const std::uint32_t at =
          row_address + piece / 8 * kSlab * sizeof(T) + ((piece % 8 ^ lane % 8) << 4);
      store_matrices(at, pack_pair<T>(out[8 * j], out[8 * j + 1]),
                     pack_pair<T>(out[8 * j + 2], out[8 * j + 3]),
                     pack_pair<T>(out[8 * j + 4], out[8 * j + 5]),
                     pack_pair<T>(out[8 * j + 6], out[8 * j + 7]));
    }
    fence_async_proxy();
    barrier();
    const int first_row = index_ * kWgmmaRows;
    const int num_rows = min(kWgmmaRows, work.num_rows - first_row);
    if (params_.attend.problem.packed_q() && num_rows < kWgmmaRows) {
      copy_rows(slabs, work, num_rows);
    } else if (is_first_thread() && num_rows > 0) {
#pragma unroll
      for (int slab = 0; slab < Config::kSlabs; ++slab) {
        store_box(params_.out, {slab * kSlabColumns, work.q_row + first_row, work.head, work.batch},
                  slabs + slab * kSlab);
      }
      commit_stores();
    }
  }

  __device__ __forceinline__ void copy_rows(const T* slabs, const WorkTile& work,
                                            int num_rows) const {
    const AttentionProblem& p = params_.attend.problem;
    constexpr int kItems = 16 / sizeof(T);
    const int pieces = static_cast<int>(p.head_dim_v) / kItems;  // head_dim_v is a multiple of 8
    const int thread = static_cast<int>(computed_here(threadIdx.x) % kWarpgroupSize);
    T* const to = static_cast<T*>(p.out.data);
#pragma unroll 1
    for (int first = 0; first < num_rows * pieces; first += kWarpgroupSize) {
      const int i = first + thread;
      if (i >= num_rows * pieces) continue;
      const int row = i / pieces;
      const int piece = i - row * pieces;
      const T* const from =
          slabs + (piece / 8 * Config::kRows + row) * kSlabColumns + (piece % 8 ^ row % 8) * kItems;
      const std::int64_t at =
          p.out.row_offset(work.batch, work.q_row + index_ * kWgmmaRows + row, work.head);
      *reinterpret_cast<uint4*>(to + at + piece * kItems) = *reinterpret_cast<const uint4*>(from);
    }
  }

  __device__ __forceinline__ void barrier() const {
    named_barrier_sync(kFirstOutputBarrier + index_, kWarpgroupSize);
  }

  const PrefillSm90Params& params_;
  Shared& shared_;
  const int index_;  ///< of the consumer
  const int row_;    ///< of the tile: the thread's first, the other is 8 below
  const MatrixDescriptor first_q_;
  MatrixDescriptor q_;  ///< of the current place
  const MatrixDescriptor k_;
  const MatrixDescriptor v_;
  RingPlace<Config::kStages> stage_;
  RingPlace<kWorkPlaces> place_;
  RingPlace<Config::kQueryPlaces> query_;
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    prefill_sm90(const __grid_constant__ PrefillSm90Params params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  PrefillSm90Shared<Config>& shared = *reinterpret_cast<PrefillSm90Shared<Config>*>(shared_bytes);
  // Uniform in the eyes of the compiler, or each matrix product gets code to make it so.
  const int warpgroup = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarpgroupSize, 0);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(params.q);
    prefetch_tensor_map(params.k);
    prefetch_tensor_map(params.v);
    prefetch_tensor_map(params.out);
    shared.init_barriers(params.attend.problem.packed_q());
  }
  __syncthreads();
  if (warpgroup == 0) {
    give_registers_back<Config::kProducerRegisters>();
    if (threadIdx.x == 0) load_all<Config>(params, shared);
    if (threadIdx.x == kWarpSize) find_all_work<Config>(params, shared);
    if (threadIdx.x / kWarpSize == 2 && params.attend.problem.packed_q()) clear_all(shared);
  } else {
    take_registers<Config::kConsumerRegisters>();
    Consumer<Config> consumer(params, shared, warpgroup - 1);
    consumer.run();
  }
#endif
}

template <typename Config>
void launch_prefill_sm90(const PrefillSm90Params& params, std::int64_t blocks,
                         cudaStream_t stream) {
  launch(prefill_sm90<Config>, "prefill_sm90",
         {blocks, Config::kThreads, sizeof(PrefillSm90Shared<Config>)}, params, stream);
}

}  // namespace tiledattn::cuda
