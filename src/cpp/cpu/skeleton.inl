// SPDX-License-Identifier: Apache-2.0
// Attention of a few rows over one block of keys, written once over the vocabulary of a vec_*.h.
//
// Rows go in groups of up to four: each K vector that is loaded meets the q of all of them, each V
// vector their weights. A group takes three steps: scores = q K, weights = exp(scores - m), o = o *
// exp(old m - m) + weights V. While one of K and V is read the other is prefetched into L2, which
// keeps more misses in flight than plain loads. Where there are many rows, products.inl has it.
//
// Everything but the table has internal linkage.
#include <stdint.h>

#include "kernels.h"
#include TILEDATTN_VEC

#ifndef TILEDATTN_PACKS_BFLOAT16
#define TILEDATTN_PACKS_BFLOAT16 false
#endif

#define TILEDATTN_INLINE [[gnu::always_inline]] inline

namespace {

using tiledattn::cpu::BlockArgs;
using tiledattn::cpu::kBlockKeys;
using tiledattn::cpu::kGroupKeys;
using tiledattn::cpu::kGroupRows;
using tiledattn::cpu::kMostElements;

static_assert(kBlockKeys % kGroupKeys == 0 && kGroupKeys % kLanes == 0);

constexpr float kInfinity = __builtin_inff();

/// Rows first .. first + Rows - 1 of the block and the keys that any of them sees.
struct Group {
  int first;
  int key_begin;
  int key_end;
  bool prefetch;  ///< the first group of the block fetches for all
};

using Scores = float[kGroupRows][kBlockKeys];

/// exp(x) for x <= 0 to about one unit in the last place; 0 below the smallest normal number; NaN
/// stays NaN.
TILEDATTN_INLINE Vec exp_negative(Vec x) {
  const Vec n = nearest(x * 1.44269504f);
  Vec r = fma(n, broadcast(-0.693359375f), x);  // ln 2 in two parts: n times the first is exact
  r = fma(n, broadcast(2.12194440e-4f), r);
  Vec p = broadcast(0.0013814610f);
  p = fma(p, r, broadcast(0.0083687101f));
  p = fma(p, r, broadcast(0.0416683890f));
  p = fma(p, r, broadcast(0.1666652113f));
  p = fma(p, r, broadcast(0.4999999404f));
  p = fma(p, r * r, r) + 1.0f;
  // What was computed for x further down, -inf among it, is of no use.
  return select(x < broadcast(-87.3365f), Vec{}, p * power_of_two(n));
}

TILEDATTN_INLINE Vec tanh(Vec x) {
  const Vec magnitude = larger(-x, x);
  const Vec square = x * x;
  Vec p = broadcast(-0.0057170368f);
  p = fma(p, square, broadcast(0.0206505786f));
  p = fma(p, square, broadcast(-0.0537434965f));
  p = fma(p, square, broadcast(0.1333149076f));
  p = fma(p, square, broadcast(-0.3333328366f));
  const Vec small = fma(p * square, x, x);
  const Vec t = exp_negative(-2.0f * magnitude);
  const Vec large = (1.0f - t) / (1.0f + t);
  return select(magnitude < broadcast(0.625f), small, select(x < Vec{}, -large, large));
}

TILEDATTN_INLINE void prefetch_row(const void* row, int bytes) {
  for (int b = 0; b < bytes; b += 64) __builtin_prefetch(static_cast<const char*>(row) + b, 0, 2);
}

/// Scores before scale of Rows rows and the keys of the group.
template <typename T, typename D, int Rows>
TILEDATTN_INLINE void make_scores(const BlockArgs& a, const Group& group, Scores& scores) {
  // More accumulators than this in flight gain nothing, and their K addresses would leave the
  // registers.
  constexpr int kKeys =
      Rows > 2 ? kAccumulators / 4 : (kAccumulators / Rows > 8 ? 8 : kAccumulators / Rows);
  static_assert(kGroupKeys % kKeys == 0);
  // Summed up further in a row, products of one sign lose more than the bound for float32 allows.
  constexpr int kSummedInTurn = 32 * kLanes;
  static_assert(kSummedInTurn % D::kStep == 0);
  constexpr bool kOnce = kMostElements <= kSummedInTurn;
  const typename D::Query* q[Rows];
  for (int r = 0; r < Rows; ++r)
    q[r] = static_cast<const typename D::Query*>(a.q) + (group.first + r) * a.q_stride;
  const int head_dim = a.head_dim;
  const int v_bytes = a.head_dim_v * static_cast<int>(sizeof(T));

  for (int j = group.key_begin / kKeys * kKeys; j < group.key_end; j += kKeys) {
    if (group.prefetch)
      for (int i = 0; i < kKeys; ++i) prefetch_row(a.v[j + i], v_bytes);
    const T* k[kKeys];
    for (int i = 0; i < kKeys; ++i) k[i] = static_cast<const T*>(a.k[j + i]);
    int d = 0;
    do {
      const bool first = kOnce || d == 0;
      const int end = kOnce || d + kSummedInTurn > head_dim ? head_dim : d + kSummedInTurn;
      Vec sums[kAccumulators];
      // One by one: GCC clears an array as a whole by a string instruction, which takes as long as
      // the sums of a short row.
#pragma GCC unroll 16
      for (int i = 0; i < kAccumulators; ++i) sums[i] = Vec{};
      // Unrolled further, the loads of the next step are hoisted and the sums leave the registers.
#pragma GCC unroll 1
      for (; d + D::kStep <= end; d += D::kStep) {
        typename D::QueryOperand x[Rows];
        for (int r = 0; r < Rows; ++r) x[r] = D::load_query(q[r] + d);
        typename D::Operand y{};  // where the loop stays one, GCC sees no first value
        // One loop over all sums, unrolled early: else they leave the registers.
#pragma GCC unroll 16
        for (int n = 0; n < kKeys * Rows; ++n) {
          const int i = n / Rows, r = n % Rows;
          if (r == 0) y = D::load_key(k[i] + d);
          sums[r * kKeys + i] = D::accumulate(x[r], y, sums[r * kKeys + i]);
        }
      }
      if (d < end) {
        typename D::QueryOperand x[Rows];
        for (int r = 0; r < Rows; ++r) x[r] = D::load_query(q[r] + d);
        typename D::Operand y[kKeys];
        for (int i = 0; i < kKeys; ++i) y[i] = D::load_key_first(k[i] + d, head_dim - d);
#pragma GCC unroll 16
        for (int n = 0; n < Rows * kKeys; ++n)
          sums[n] = D::accumulate(x[n / kKeys], y[n % kKeys], sums[n]);
        d = head_dim;
      }
      float total[kAccumulators];
      for (int i = 0; i < Rows * kKeys; i += kLanes) store(total + i, sum_each(sums + i));
      for (int r = 0; r < Rows; ++r) {
        if (!first)
          for (int i = 0; i < kKeys; ++i) total[r * kKeys + i] += scores[r][j + i];
        __builtin_memcpy(scores[r] + j, total + r * kKeys, kKeys * sizeof(float));
      }
    } while (!kOnce && d < head_dim);
  }
}

/// Scale, softcap and mask of one row's scores; returns the largest. A NaN counts for nothing here:
/// its weight makes l NaN.
TILEDATTN_INLINE float finish_scores(const BlockArgs& a, const Group& group, int row,
                                     float* scores) {
  const float begin = static_cast<float>(a.row_begin[row]);
  const float end = static_cast<float>(a.row_end[row]);
  const int first = group.key_begin / kLanes * kLanes;
  const int last = (group.key_end + kLanes - 1) / kLanes * kLanes;
  const bool masked = a.row_begin[row] > first || a.row_end[row] < last;
  Vec top = broadcast(-kInfinity);
  for (int j = first; j < last; j += kLanes) {
    Vec s = load(scores + j) * a.softmax_scale;
    if (a.k_scale != nullptr) s *= load(a.k_scale + j);
    if (a.softcap > 0.0f) s = a.softcap * tanh(s / a.softcap);
    if (masked) {
      const Vec key = lane_numbers() + static_cast<float>(j);
      s = select((key >= begin) & (key < end), s, broadcast(-kInfinity));
    }
    store(scores + j, s);
    top = larger(s, top);
  }
  return largest(top);
}

/// Scores of one row to weights, with the scales of V in them; moves m and l on and returns the
/// factor of what o holds.
TILEDATTN_INLINE float make_weights(const BlockArgs& a, const Group& group, int row,
                                    float* scores) {
  const float top = finish_scores(a, group, row, scores);
  const float m = a.m[row];
  const float new_m = top > m ? top : m;
  // With no key but those of score -inf so far, any finite base gives them weight 0.
  const float base = new_m == -kInfinity ? 0.0f : new_m;
  const int first = group.key_begin / kLanes * kLanes;
  Vec total = {};
  for (int j = first; j < group.key_end; j += kLanes) {
    const Vec weight = exp_negative(load(scores + j) - base);
    store(scores + j, a.v_scale == nullptr ? weight : weight * load(a.v_scale + j));
    total += weight;
  }
  const float factor = exp_negative(broadcast(m - base))[0];
  a.m[row] = new_m;
  a.l[row] = a.l[row] * factor + sum(total);
  return factor;
}

/// o of Rows rows, columns d .. d + Vectors * kLanes - 1 (Part: only the first `left` of them exist
/// in V).
template <typename T, int Rows, int Vectors, bool Part>
TILEDATTN_INLINE void add_values(const BlockArgs& a, const Group& group, const Scores& weights,
                                 const float* factor, int d, int left, bool prefetch) {
  Vec sums[Rows][Vectors] = {};
  const int k_bytes = a.head_dim * static_cast<int>(sizeof(T));
  const int end = group.key_end;
#pragma GCC unroll 1
  for (int j = group.key_begin; j < end; ++j) {
    if (prefetch && j < a.num_next_keys) prefetch_row(a.next_k[j], k_bytes);
    const T* v = static_cast<const T*>(a.v[j]) + d;
    Vec x[Vectors];
    if constexpr (Part) {
      x[0] = load_first(v, left);
    } else if constexpr (Vectors == 1) {
      x[0] = load(v);
    } else {
      load_vectors<Vectors>(v, x);
    }
    for (int r = 0; r < Rows; ++r) {
      const Vec weight = broadcast(weights[r][j]);
      for (int i = 0; i < Vectors; ++i) sums[r][i] = fma(x[i], weight, sums[r][i]);
    }
  }
  for (int r = 0; r < Rows; ++r) {
    float* o = a.o + (group.first + r) * a.o_stride + d;
    for (int i = 0; i < Vectors; ++i) {
      store(o + i * kLanes, fma(load(o + i * kLanes), broadcast(factor[r]), sums[r][i]));
    }
  }
}

}  // namespace

#include "products.inl"

namespace {

template <typename T, typename D, int Rows>
void attend_group(const BlockArgs& a, Group group) {
  group.key_begin = a.num_keys;
  group.key_end = 0;
  for (int r = group.first; r < group.first + Rows; ++r) {
    if (a.row_begin[r] >= a.row_end[r]) continue;
    if (a.row_begin[r] < group.key_begin) group.key_begin = a.row_begin[r];
    if (a.row_end[r] > group.key_end) group.key_end = a.row_end[r];
  }
  if (group.key_begin >= group.key_end) return;

  // Only whole vectors of what is looked at: GCC clears the array by a string instruction.
  alignas(64) Scores scores;
  for (int j = group.key_begin / kLanes * kLanes; j < group.key_end; j += kLanes)
    for (int r = 0; r < Rows; ++r) store(scores[r] + j, Vec{});
  float factor[Rows];
  make_scores<T, D, Rows>(a, group, scores);
  for (int r = 0; r < Rows; ++r) factor[r] = make_weights(a, group, group.first + r, scores[r]);

  constexpr int kColumns = kValueVectors * kLanes;
  int d = 0;
  for (; d + kColumns <= a.head_dim_v; d += kColumns) {
    add_values<T, Rows, kValueVectors, false>(a, group, scores, factor, d, 0,
                                              group.prefetch && d == 0);
  }
  for (; d + kLanes <= a.head_dim_v; d += kLanes) {
    add_values<T, Rows, 1, false>(a, group, scores, factor, d, 0, false);
  }
  if (d < a.head_dim_v)
    add_values<T, Rows, 1, true>(a, group, scores, factor, d, a.head_dim_v - d, false);
}

/// D: how q is packed and meets K.
template <typename T, typename D = Dot<T>>
void attend_block(const BlockArgs& a) {
  if (a.q_panels != nullptr) return attend_products<T>(a);
  for (int first = 0; first < a.num_rows; first += kGroupRows) {
    const Group group{first, 0, 0, first == 0};
    switch (a.num_rows - first) {
      case 1:
        attend_group<T, D, 1>(a, group);
        break;
      case 2:
        attend_group<T, D, 2>(a, group);
        break;
      case 3:
        attend_group<T, D, 3>(a, group);
        break;
      default:
        attend_group<T, D, 4>(a, group);
    }
  }
}

template <typename T>
constexpr tiledattn::cpu::AttendBlock attend_by_bfloat16() {
  if constexpr (TILEDATTN_PACKS_BFLOAT16) return attend_block<T, ByBFloat16<T>>;
  return nullptr;
}

}  // namespace

namespace tiledattn::cpu {

const CpuKernels TILEDATTN_TABLE = {
    TILEDATTN_ISA,
    {attend_block<float>, attend_block<Float16>, attend_block<BFloat16>, attend_block<Int8>,
     attend_block<Float8>, attend_by_bfloat16<Int8>(), attend_by_bfloat16<Float8>()},
    TILEDATTN_PACKS_BFLOAT16,
    kPanel,
    TileProduct<BFloat16>::kUnits};

}  // namespace tiledattn::cpu
