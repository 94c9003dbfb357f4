// SPDX-License-Identifier: Apache-2.0
// The part of the vocabulary that the compiler's vector extensions express for any width. Each
// vec_*.h sets kLanes, includes this, and adds what needs its instructions:
//
//   fma(a, b, c)            a * b + c
//   load(p)                 kLanes elements of any type as float32
//   load_vectors<N>(p, v)   N * kLanes of them, where that costs less than N loads
//   sum_each(v)             lane i = sum of the lanes of v[i], for kLanes vectors
//   sum(v), largest(v)      over the lanes of one vector
//   Dot<T>                  how q times K is accumulated, row by row
//   ByBFloat16<T>           the same for bytes with q that stayed bfloat16, where there is a way
//   Product<T>              how the matrix products of many rows are accumulated
//   TileProduct<T>          the same by registers that hold tiles, where there are such
//   kAccumulators           vectors of running sums that the registers hold beside their operands
//   kValueVectors           vectors of one o row that are accumulated at once for kGroupRows rows
//   kProductRows, kProductVectors   the part of a matrix product that is accumulated at once
//
// No pointer need be aligned to more than an element.
#pragma once

#include <stdint.h>

namespace {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
struct Int8 {
  int8_t value;
};
/// float8_e4m3fn, read as its value / 256: in the bits of a float16, sign, exponent and mantissa
/// then are where they are here, one place further down.
struct Float8 {
  uint8_t bits;
};

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t VecInt __attribute__((vector_size(kLanes * 4)));
typedef uint32_t VecBits __attribute__((vector_size(kLanes * 4)));
typedef uint16_t VecHalf __attribute__((vector_size(kLanes * 2)));
typedef int8_t VecByte __attribute__((vector_size(kLanes)));

inline Vec broadcast(float x) { return x - Vec{}; }

inline Vec load(const float* p) {
  Vec v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof v); }

inline Vec select(VecInt mask, Vec yes, Vec no) { return mask ? yes : no; }

/// b where either is NaN.
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

/// 0, 1, 2, ...
inline Vec lane_numbers() {
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = static_cast<float>(i);
  return v;
}

/// 2^n for whole n in -126..127. Adding 1.5 * 2^23 + 127 leaves the biased exponent in the low bits
/// of the sum.
inline Vec power_of_two(Vec n) { return (Vec)((VecBits)(n + (12582912.0f + 127.0f)) << 23); }

/// The whole number nearest to x, for |x| < 2^22.
inline Vec nearest(Vec x) { return (x + 12582912.0f) - 12582912.0f; }

/// The first n elements, zeros after them; nothing beyond them is read.
template <typename T>
inline Vec load_first(const T* p, int n) {
  T part[kLanes] = {};
  __builtin_memcpy(part, p, static_cast<unsigned>(n) * sizeof(T));
  return load(part);
}

/// The next Count * kLanes elements.
template <int Count, typename T>
inline void load_vectors(const T* p, Vec* v) {
  for (int i = 0; i < Count; ++i) v[i] = load(p + i * kLanes);
}

}  // namespace
