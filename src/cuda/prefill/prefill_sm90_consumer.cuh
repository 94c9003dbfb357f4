// SPDX-License-Identifier: Apache-2.0
// Warpgroups 1 and up of the Hopper prefill kernel: scores, weights and products, with all of them
// in registers.
#pragma once

#include <cstdint>

#include "common/mbarrier.cuh"
#include "common/softmax_state.cuh"
#include "common/wgmma.cuh"
#include "prefill/prefill_sm90_output.cuh"
#include "prefill/prefill_sm90_shared.cuh"
#include "prefill/prefill_sm90_softmax.cuh"

namespace tiledattn::cuda {

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
        row_(index * kWgmmaRows + consumer_warp_row() + consumer_lane() / 4),
        output_(params, shared, index),
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
          bool ended = false;
          if constexpr (Config::kQueryPlaces > 1) {
            shared_.work_full[next_place.index()].wait(next_place.parity());
            const WorkTile& next = shared_.work[next_place.index()];
            next_begun = next.has_keys();
            ended = next_begun && end_of_keys(next) == next.end;
            if (ended) change_tile(out, weights, next_rows, next);
          }
          if (!ended) end(out, weights, rows);
          if (!ended && next_begun)
            begin(weights, next_rows,
                  shared_.work[next_place.index()]);  // others wait for its turns
        } else {
          shared_.q_full[query_.index()].wait(query_.parity());
          leave_queries();
        }
        output_.write(out, rows, work, rows_left);
        // What lies behind the sequence must not decide this.
        huge = (rows.huge[0] && rows_left > 0) || (rows.huge[1] && rows_left > 8);
      }
      if (__any_sync(kAllLanes, huge) && consumer_lane() == 0) shared_.repeat[place_.index()] = 1;
      shared_.work_empty[place_.index()].arrive();  // each lane has read what it needs of the work
      place_ = next_place;
      rows = next_rows;
      begun = next_begun;
    }
    output_.wait();
  }

 private:
  static constexpr int kTurnThreads = 2 * kWarpgroupSize;
  static constexpr int kScores = Config::kKeys / 2;  ///< of a thread
  static constexpr int kOutputs = Config::kDim / 2;

  /// The warp is done with what the barrier guards.
  __device__ __forceinline__ static void release(MBarrier& barrier) {
    if (consumer_lane() == 0) barrier.arrive();
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

  /// Which columns of key tile `tile` the thread's rows see.
  __device__ __forceinline__ void mask(float (&scores)[kScores], const WorkTile& work,
                                       int tile) const {
    const int first_column = tile * Config::kKeys + consumer_lane() % 4 * 2;
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
    if (Config::kAnchoredRows == 0 || consumer_lane() != 0) return;
    const unsigned warp = threadIdx.x / 32u - 4u;
    const float sums = Config::kAnchoredRows == 1 ? rows.l[0] : rows.l[0] + rows.l[1];
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(shared_address(&shared_.anchors[warp])), "f"(sums)
                 : "memory");
  }

  /// What the warpgroup's own rows see of the tiles of keys.
  __device__ __forceinline__ int end_of_keys(const WorkTile& work) const {
    return Config::kTall ? work.end_of_rows<Config>(index_ * kWgmmaRows) : work.end;
  }
  __device__ __forceinline__ int full_end(const WorkTile& work) const {
    return Config::kTall ? work.full_end_of_rows<Config>(index_ * kWgmmaRows) : work.full_end;
  }

  /// Weights of the first tile of keys of `work`, whose scores have been made.
  __device__ __forceinline__ void make_first_weights(float (&scores)[kScores], RowPair& rows,
                                                     const WorkTile& work) const {
    if (Config::kGeneral) transform_scores(scores, params_);
    const int tile = end_of_keys(work) - 1;
    if (Config::kGeneral || tile >= full_end(work)) mask(scores, work, tile);
    make_weights<true>(scores, rows, params_.scores.log2_scale);
    rows.rescale[0] = rows.rescale[1] = 1.0f;  // there is no output yet
  }

  /// Leaves the current tile of keys to the other warpgroups.
  __device__ __forceinline__ void skip_keys() {
    shared_.k_full[stage_.index()].wait(stage_.parity());
    release(shared_.k_empty[stage_.index()]);
    shared_.v_full[stage_.index()].wait(stage_.parity());
    release(shared_.v_empty[stage_.index()]);
    stage_.advance();
  }

  /// The first tile of keys, with nothing to overlap it, and those before it that the rows do not
  /// see. Turns go on meanwhile, one for each tile.
  __device__ __forceinline__ void begin(std::uint32_t (&weights)[kScores / 2], RowPair& rows,
                                        const WorkTile& work) {
    if constexpr (Config::kTall) {
#pragma unroll 1
      for (int unseen = work.end - end_of_keys(work); unseen > 0; --unseen) {
        take_turn();
        pass_turn();
        skip_keys();
      }
    }
    float scores[kScores];
    shared_.q_full[query_.index()].wait(query_.parity());
    shared_.k_full[stage_.index()].wait(stage_.parity());
    take_turn();
    issue_scores(scores);
    pass_turn();
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
      make_lagged_weights(scores, rows, params_.scores.log2_scale);
    } else {
      make_weights<kMasked>(scores, rows, params_.scores.log2_scale);
    }
    anchor(rows);
    wgmma_wait<0>();
    release(shared_.v_empty[last.index()]);
    pack(weights, scores);
    if (!Config::kLateRescale && rows.must_rescale()) scale_output(out, rows.rescale);
    if constexpr (Config::kLagged && !kMasked)
      raise_maximum(rows, weights, params_.scores.log2_scale);
  }

  /// All tiles of keys behind the first.
  __device__ __forceinline__ void walk(float (&out)[kOutputs],
                                       std::uint32_t (&weights)[kScores / 2], RowPair& rows,
                                       const WorkTile& work) {
    const int begin = work.begin;
    const int full_begin = work.full_begin;
    const int full_end = this->full_end(work);
    int tile = end_of_keys(work) - 2;
#pragma unroll 1
    for (; tile >= full_end; --tile) step<true>(out, weights, rows, work, tile);
    if (tile >= full_begin) {
      rows.note_size(params_.scores.log2_scale);
#pragma unroll 1
      for (; tile >= full_begin; --tile) step<false>(out, weights, rows, work, tile);
      rows.note_size(params_.scores.log2_scale);
    }
    if constexpr (Config::kGeneral) {
#pragma unroll 1
      for (; tile >= begin; --tile) step<true>(out, weights, rows, work, tile);
    }
  }

  const PrefillSm90Params& params_;
  Shared& shared_;
  const int index_;  ///< of the consumer
  const int row_;    ///< of the tile: the thread's first, the other is 8 below
  OutputRows<Config> output_;
  const MatrixDescriptor first_q_;
  MatrixDescriptor q_;  ///< of the current place
  const MatrixDescriptor k_;
  const MatrixDescriptor v_;
  RingPlace<Config::kStages> stage_;
  RingPlace<kWorkPlaces> place_;
  RingPlace<Config::kQueryPlaces> query_;
};

}  // namespace tiledattn::cuda
