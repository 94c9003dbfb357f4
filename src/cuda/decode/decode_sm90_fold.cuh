// SPDX-License-Identifier: Apache-2.0
// From the slices of a group to the result of a head, always in the order of keys.
//
// A team folds the slices of each group through shared memory; the thread that holds some columns
// of a row keeps them. If the team began the head, it goes on folding group after group and, where
// it also ends the head, finishes it without any scratch. Otherwise it leaves what it has as
// partial results: the groups from 0 on folded into one, each later group alone. When all its work
// is done, it counts what it left, of two heads at most; who completes the count of a head folds
// its partial results.
#pragma once

#include <cstdint>

#include "common/finish_row.cuh"
#include "common/mbarrier.cuh"
#include "common/softmax_state.cuh"
#include "decode/decode_sm90_slice.cuh"
#include "decode/decode_sm90_work.cuh"

namespace tiledattn::cuda {

/// This thread's place in its team.
struct TeamMember {
  static constexpr int kThreads = kDecodeTeamWarps * kWarpSize;
  int team;    ///< of the block
  int warp;    ///< of the team
  int thread;  ///< of the team

  __device__ __forceinline__ void sync() const { named_barrier_sync(team + 1, kThreads); }
};

/// Four columns of a row or, with two halves, eight: four more that stand half a pass further on.
template <int kHalves>
struct PartOfRow {
  float m = -infinity();
  float l = 0.0f;
  float4 o[kHalves] = {};
};

/// o = o * a + other * b.
__device__ __forceinline__ void scale_and_add(float4& o, float a, const float4& other, float b) {
  o.x = fmaf(other.x, b, __fmul_rn(o.x, a));
  o.y = fmaf(other.y, b, __fmul_rn(o.y, a));
  o.z = fmaf(other.z, b, __fmul_rn(o.z, a));
  o.w = fmaf(other.w, b, __fmul_rn(o.w, a));
}

/// part = merge(part, later). NaN stays; nothing stands for infinity: two empty parts stay empty.
template <int kHalves>
__device__ __forceinline__ void fold(PartOfRow<kHalves>& part, const PartOfRow<kHalves>& later) {
  const float m = max_or_nan(part.m, later.m);
  const float shift = m == -infinity() ? 0.0f : m;
  const float a = exp_fast(__fsub_rn(part.m, shift));
  const float b = exp_fast(__fsub_rn(later.m, shift));
  part.m = m;
  part.l = fmaf(later.l, b, __fmul_rn(part.l, a));
#pragma unroll
  for (int half = 0; half < kHalves; ++half) scale_and_add(part.o[half], a, later.o[half], b);
}

/// Where a column of a row stands. Lanes write rows 2t and 2t + 1 and column g at a time: this
/// gives each its own bank.
__device__ __forceinline__ int swizzled(int row, int column) { return column ^ (row % 8 / 2 * 8); }

/// A part of a head of which other teams do the rest.
struct HeadPart {
  int seq;
  int head;
  int slot;  ///< of its partial results
  int first_group;
  int count;  ///< of groups in this part
  int num_groups;
};

/// Only the first and the last head of a team's share can be shared.
constexpr int kMaxParts = 2;

/// Shared memory of a team: the slices of one pass, and the parts of heads.
template <typename Config>
struct alignas(16) SliceBuffers {
  float o[kDecodeTeamWarps][Config::kTiles * 8][Config::kPassColumns];  ///< at swizzled(column)
  float2 ml[kDecodeTeamWarps][Config::kTiles * 8];                      ///< m, l
  int num_parts;
  HeadPart parts[kMaxParts];
  int first_counts[kMaxParts];  ///< see bring()
};

/// The row and the columns of one thread in all folds: eight columns, or four where the team has
/// threads enough for that.
template <typename Config>
struct FoldPlace {
  static constexpr int kFours = Config::kPassColumns / 4;  // of a row
  static constexpr int kHalves = Config::kRows * kFours > TeamMember::kThreads ? 2 : 1;
  static constexpr int kThreadsPerRow = kFours / kHalves;
  static constexpr int kHalf = Config::kPassColumns / 2;
  int row;     ///< of the head's tile of rows
  int column;  ///< of the pass, the first of four; the second four stand at + kHalf

  __device__ explicit FoldPlace(const TeamMember& member)
      : row(member.thread / kThreadsPerRow), column(member.thread % kThreadsPerRow * 4) {}
};

/// Shared memory for what a thread has of a head. With 16 rows over bytes registers do not hold it.
template <typename Config>
struct HeadTotals {
  static constexpr int kPasses = Config::kDim / Config::kPassColumns;
  static constexpr bool kUsed = kQuantized<typename Config::Element> && Config::kTiles > 1;
  PartOfRow<FoldPlace<Config>::kHalves> parts[kUsed ? kPasses : 1];
};

template <typename Config>
class HeadResult {
 public:
  static constexpr int kPasses = HeadTotals<Config>::kPasses;
  using Place = FoldPlace<Config>;
  using Part = PartOfRow<Place::kHalves>;

  /// `totals`: this thread's own, where they are used.
  __device__ __forceinline__ explicit HeadResult(HeadTotals<Config>* totals) : totals_(totals) {}

  /// The team begins its part of a head at `first_group`. `slot`: where partial results go, if the
  /// part is not the whole head.
  __device__ __forceinline__ void begin(const DecodeSm90Params& params, const Place& place,
                                        const HeadRows& head, int first_group, int slot) {
    first_group_ = first_group;
    slot_ = slot;
    present_ = place.row < Config::kRows && head.first_row + place.row < params.rows;
  }

  /// Folds one group, of which each warp brings its slice. Called by the whole team.
  __device__ __forceinline__ void add_group(const DecodeSm90Params& params,
                                            const TeamMember& member, const Place& place,
                                            SliceBuffers<Config>& buffers, int group,
                                            const SliceState<Config>& slice) {
    if (lane_index() < 4) {
#pragma unroll
      for (int tile = 0; tile < Config::kTiles; ++tile)
#pragma unroll
        for (int side = 0; side < 2; ++side)
          buffers.ml[member.warp][tile * 8 + lane_index() * 2 + side] =
              make_float2(slice.m[tile][side], slice.l[tile][side]);
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      write_slice(buffers, member.warp, slice, pass);
      member.sync();
      if (present_) {
        const Part part = fold_slices(buffers, place);
        if (group == 0) {
          total(pass) = part;
        } else if (first_group_ == 0) {
          fold(total(pass), part);
        } else {
          store_partial(params, place, pass, group, part);
        }
      }
      member.sync();
    }
  }

  /// The team's part of the head ends with `last_group`. True where that is the whole head and its
  /// result is in this thread; else the part is noted. Called by the whole team.
  __device__ __forceinline__ bool end(const DecodeSm90Params& params, const TeamMember& member,
                                      const Place& place, SliceBuffers<Config>& buffers, int seq,
                                      int head, int last_group, int num_groups) {
    if (first_group_ == 0 && last_group + 1 == num_groups) return true;
    if (first_group_ == 0 && present_) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) store_partial(params, place, pass, 0, total(pass));
    }
    if (member.thread == 0)
      buffers.parts[buffers.num_parts++] = {
          seq, head, slot_, first_group_, last_group + 1 - first_group_, num_groups};
    return false;
  }

  /// Counts the groups of the parts; after the last of them, by the whole team. In the team that
  /// completes a head, first_counts[part] becomes how many groups are folded into the partial
  /// result of group 0; else 0. The stores of the whole team are seen by who completes it: a
  /// thread's release and acquire cover those that the team's barriers order around it.
  __device__ __forceinline__ void bring(const DecodeSm90Params& params, const TeamMember& member,
                                        SliceBuffers<Config>& buffers) const {
    static_assert(kMaxDecodeGroups < 1 << 16);
    member.sync();
    if (member.thread < buffers.num_parts) {  // both counters at once
      const HeadPart& part = buffers.parts[member.thread];
      std::uint32_t* const counter = params.counters + part.slot;
      // Groups in the lower half; in the upper one those that came together with group 0.
      const auto count = static_cast<std::uint32_t>(part.count);
      const std::uint32_t mine = part.first_group == 0 ? count << 16 | count : count;
      std::uint32_t before;
      asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                   : "=r"(before)
                   : "l"(counter), "r"(mine)
                   : "memory");
      const std::uint32_t now = before + mine;
      const bool last = (now & 0xffff) == static_cast<std::uint32_t>(part.num_groups);
      if (last) *counter = 0;  // for the next launch
      buffers.first_counts[member.thread] = last ? static_cast<int>(now >> 16) : 0;
    }
    member.sync();
  }

  /// The result of a whole head from its partial results, of which the first `first_count` are one;
  /// after begin() for the head. Called by the whole team that completed it.
  __device__ __forceinline__ void fold_head(const DecodeSm90Params& params, const Place& place,
                                            int first_count, int num_groups) {
    if (!present_) return;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
      total(pass) = fold_partials(params, place, pass, first_count, num_groups);
  }

  /// The result into the state, out and lse. Called by the whole team.
  __device__ __forceinline__ void write(const DecodeSm90Params& params, const TeamMember& member,
                                        const Place& place, const HeadRows& rows) {
    const AttentionProblem& p = params.problem;
    const int seq = rows.seq;
    const int row = rows.first_row + place.row;
    const int token = params.group.divide(row);
    const int group = static_cast<int>(params.group.value);
    const int head = rows.kv_head * group + row - token * group;
    if (p.state.m != nullptr) {
      const std::int64_t at = p.state.row(seq, token, head, p.num_q_heads);
      float m = 0.0f;
      float l = 0.0f;
      if (present_ && !p.state.fresh) {
        m = p.state.m[at];
        l = p.state.l[at];
      }
      if (!p.state.fresh) member.sync();  // all threads of a row have read m and l
      if (present_) add_to_state(p, place, at, m, l);
    }
    if (p.out.data == nullptr || !present_) return;
    const RowResult result(total(0).m, total(0).l, p.sinks == nullptr ? nullptr : p.sinks + head);
    const std::int64_t at = p.out.row_offset(seq, token, head);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
#pragma unroll
      for (int half = 0; half < Place::kHalves; ++half) {
        const int column = column_of(place, pass, half);
        if (column >= p.head_dim_v) continue;
        const float4& o = total(pass).o[half];
        store_out(p.out, at + column,
                  make_float4(result.value(o.x), result.value(o.y), result.value(o.z),
                              result.value(o.w)));
      }
    if (p.out.lse != nullptr && place.column == 0)
      p.out.lse[p.out.lse_offset(seq, token, head)] = result.lse;
  }

 private:
  __device__ __forceinline__ Part& total(int pass) {
    if constexpr (HeadTotals<Config>::kUsed) {
      return totals_->parts[pass];
    } else {
      return own_[pass];
    }
  }

  __device__ __forceinline__ static int column_of(const Place& place, int pass, int half) {
    return pass * Config::kPassColumns + half * Place::kHalf + place.column;
  }

  __device__ __forceinline__ static void write_slice(SliceBuffers<Config>& buffers, int warp,
                                                     const SliceState<Config>& slice, int pass) {
    constexpr int kParts = Config::kPassColumns / 16;
    const int row = lane_index() % 4 * 2;
    const int column = lane_index() / 4;
#pragma unroll
    for (int tile = 0; tile < Config::kTiles; ++tile)
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const float (&o)[4] = slice.o[pass * kParts + i][tile];
        if constexpr (kQuantized<typename Config::Element>) {  // columns 2g and 2g + 1
#pragma unroll
          for (int side = 0; side < 2; ++side)
            *reinterpret_cast<float2*>(
                &buffers.o[warp][tile * 8 + row + side][swizzled(row, i * 16 + column * 2)]) =
                make_float2(o[side], o[2 + side]);
        } else {
#pragma unroll
          for (int j = 0; j < 4; ++j)
            buffers.o[warp][tile * 8 + row + j % 2][swizzled(row, i * 16 + j / 2 * 8 + column)] =
                o[j];
        }
      }
  }

  /// The slices of this thread's columns. Those that saw nothing weigh nothing.
  __device__ __forceinline__ static Part fold_slices(const SliceBuffers<Config>& buffers,
                                                     const Place& place) {
    float2 ml[kDecodeTeamWarps];
    Part part;
#pragma unroll
    for (int warp = 0; warp < kDecodeTeamWarps; ++warp) {
      ml[warp] = buffers.ml[warp][place.row];
      part.m = max_or_nan(part.m, ml[warp].x);
    }
    const float shift = part.m == -infinity() ? 0.0f : part.m;
    float weights[kDecodeTeamWarps];
#pragma unroll
    for (int warp = 0; warp < kDecodeTeamWarps; ++warp) {
      weights[warp] = exp_fast(__fsub_rn(ml[warp].x, shift));
      part.l = fmaf(ml[warp].y, weights[warp], part.l);
    }
#pragma unroll
    for (int half = 0; half < Place::kHalves; ++half) {
      const int column = swizzled(place.row, place.column + half * Place::kHalf);
#pragma unroll
      for (int warp = 0; warp < kDecodeTeamWarps; ++warp) {
        const float4 o = *reinterpret_cast<const float4*>(&buffers.o[warp][place.row][column]);
        scale_and_add(part.o[half], 1.0f, o, weights[warp]);
      }
    }
    return part;
  }

  /// Floats of a row of a partial result, and of all its rows.
  __device__ __forceinline__ static int row_size(const DecodeSm90Params& params) {
    return static_cast<int>(kDecodePartialHeader + params.problem.head_dim_v);
  }
  __device__ __forceinline__ static int partial_size(const DecodeSm90Params& params) {
    const int rows = params.rows < Config::kTiles * 8 ? params.rows : Config::kTiles * 8;
    return rows * row_size(params);
  }

  /// This thread's row of the partial result of `group`. Made anew where it is needed, which is
  /// rare: registers are short.
  __device__ __forceinline__ float* partial_row(const DecodeSm90Params& params, const Place& place,
                                                int group) const {
    return params.partials +
           std::int64_t{slot_ * params.max_groups + group} * partial_size(params) +
           place.row * row_size(params);
  }

  __device__ __forceinline__ void store_partial(const DecodeSm90Params& params, const Place& place,
                                                int pass, int group, const Part& part) const {
    float* const row = partial_row(params, place, group);
#pragma unroll
    for (int half = 0; half < Place::kHalves; ++half) {
      const int column = column_of(place, pass, half);
      if (column < params.problem.head_dim_v)
        __stcg(reinterpret_cast<float4*>(row + kDecodePartialHeader + column), part.o[half]);
    }
    if (pass == 0 && place.column == 0)
      __stcg(reinterpret_cast<float4*>(row), make_float4(part.m, part.l, 0.0f, 0.0f));
  }

  /// Four floats that another block has written. The load stays where it stands: left alone, the
  /// compiler waits for one partial result before it asks for the next.
  __device__ __forceinline__ static float4 load_now(const float* at) {
    float4 x;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(at)
                 : "memory");
    return x;
  }

  /// The same for the two floats before a row.
  __device__ __forceinline__ static float2 load_header_now(const float* at) {
    float2 x;
    asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(at) : "memory");
    return x;
  }

  /// The partial results of all groups, of which the first `first_count` are one.
  __device__ __forceinline__ Part fold_partials(const DecodeSm90Params& params, const Place& place,
                                                int pass, int first_count, int num_groups) const {
    // What the registers hold.
    constexpr int kAtOnce = Place::kHalves == 1 ? 16 : Config::kTiles > 1 ? 4 : 8;
    const int num_parts = num_groups - first_count + 1;
    const float* const rows = partial_row(params, place, 0);
    const int size = partial_size(params);
    int columns[Place::kHalves];
#pragma unroll
    for (int half = 0; half < Place::kHalves; ++half) {
      const int column = column_of(place, pass, half);  // past the last ones: any
      columns[half] =
          column < params.problem.head_dim_v ? static_cast<int>(kDecodePartialHeader) + column : 0;
    }
    Part total;
#pragma unroll 1
    for (int first = 0; first < num_parts; first += kAtOnce) {
      Part parts[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int part = first + i < num_parts ? first + i : num_parts - 1;
        const float* const row = rows + (part == 0 ? 0 : part + first_count - 1) * size;
        const float2 header = load_header_now(row);
        parts[i].m = header.x;
        parts[i].l = header.y;
#pragma unroll
        for (int half = 0; half < Place::kHalves; ++half)
          parts[i].o[half] = load_now(row + columns[half]);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        Part with = total;
        fold(with, parts[i]);
        if (first + i == 0) with = parts[i];  // its very bits
        if (first + i < num_parts) total = with;
      }
    }
    return total;
  }

  /// total = merge(state, total), and the state is that. An empty call leaves the state as it is,
  /// bit for bit, and an empty state takes the call's.
  __device__ __forceinline__ void add_to_state(const AttentionProblem& p, const Place& place,
                                               std::int64_t row, float m, float l) {
    const bool merges = !p.state.fresh;
    const Fold parts(m, l, total(0).m, total(0).l);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int half = 0; half < Place::kHalves; ++half) {
        const int column = column_of(place, pass, half);
        if (column >= p.head_dim_v) continue;
        float* const at = p.state.o + row * p.head_dim_v + column;
        float4& o = total(pass).o[half];
        if (merges) {
          const float4 before = load_four(at);
          o = make_float4(parts.value(before.x, o.x), parts.value(before.y, o.y),
                          parts.value(before.z, o.z), parts.value(before.w, o.w));
        }
        store_four(at, o);
      }
    }
    if (merges) {
      total(0).m = parts.m;
      total(0).l = parts.l;
    }
    if (place.column == 0) {
      p.state.m[row] = total(0).m;
      p.state.l[row] = total(0).l;
    }
  }

  /// The state's columns start wherever the object's sizes put them.
  __device__ __forceinline__ static float4 load_four(const float* at) {
    return reinterpret_cast<std::uintptr_t>(at) % 16 == 0 ? *reinterpret_cast<const float4*>(at)
                                                          : make_float4(at[0], at[1], at[2], at[3]);
  }
  __device__ __forceinline__ static void store_four(float* at, const float4& x) {
    if (reinterpret_cast<std::uintptr_t>(at) % 16 == 0) {
      *reinterpret_cast<float4*>(at) = x;
    } else {
      at[0] = x.x;
      at[1] = x.y;
      at[2] = x.z;
      at[3] = x.w;
    }
  }

  __device__ __forceinline__ static void store_out(const OutputView& out, std::int64_t at,
                                                   const float4& x) {
    if (out.dtype == DType::float32) return store_four(static_cast<float*>(out.data) + at, x);
    auto* const to = static_cast<std::uint16_t*>(out.data) + at;
    const uint2 packed = make_uint2(pack_out(out, x.x, x.y), pack_out(out, x.z, x.w));
    if (reinterpret_cast<std::uintptr_t>(to) % 8 == 0) {
      *reinterpret_cast<uint2*>(to) = packed;
    } else {
      to[0] = static_cast<std::uint16_t>(packed.x);
      to[1] = static_cast<std::uint16_t>(packed.x >> 16);
      to[2] = static_cast<std::uint16_t>(packed.y);
      to[3] = static_cast<std::uint16_t>(packed.y >> 16);
    }
  }

  /// Two elements of a 16-bit out, which is of the type of q.
  __device__ __forceinline__ static std::uint32_t pack_out(const OutputView& out, float low,
                                                           float high) {
    using T = typename Config::Element;
    if constexpr (kQuantized<T>) {
      return out.dtype == DType::float16 ? pack<__half>(low, high) : pack<__nv_bfloat16>(low, high);
    } else {
      return pack<T>(low, high);
    }
  }

  int first_group_ = 0;
  bool present_ = false;
  int slot_ = 0;
  HeadTotals<Config>* totals_;
  Part own_[HeadTotals<Config>::kUsed ? 1 : kPasses];
};

}  // namespace tiledattn::cuda
