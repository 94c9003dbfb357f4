// SPDX-License-Identifier: Apache-2.0
// AVX2, FMA and F16C: 16 registers of eight lanes.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace {

constexpr int kLanes = 8;
constexpr int kAccumulators = 8;
constexpr int kValueVectors = 2;
constexpr int kProductRows = 6;
constexpr int kProductVectors = 2;

}  // namespace

#include "vec_common.h"

namespace {

inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }

inline Vec load(const BFloat16* p) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

inline Vec load(const Float16* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

inline Vec load(const Int8* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}

/// Sixteen float8 elements as float16.
inline __m256i widen_float8(__m128i bytes) {
  // Sign-extended and moved to one place below the top, a byte is the float16 but for bit 14: there
  // is a copy of the sign, and NaN alone (exponent and mantissa all ones) should have a one. Only
  // of NaN does the sum change that bit, so what has changed is what should be there.
  const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
  const __m256i sum = _mm256_add_epi16(words, _mm256_set1_epi16(0x0080));
  return _mm256_xor_si256(words, _mm256_and_si256(sum, _mm256_set1_epi16(0x4000)));
}

inline Vec load(const Float8* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm256_cvtph_ps(_mm256_castsi256_si128(widen_float8(bytes)));
}

template <int Count>
inline void load_vectors(const Float8* p, Vec* v) {
  static_assert(Count % 2 == 0);
  for (int i = 0; i < Count; i += 2, p += 16) {
    const __m256i half = widen_float8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    v[i] = _mm256_cvtph_ps(_mm256_castsi256_si128(half));
    v[i + 1] = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
  }
}

/// lane i = sum of the lanes of v[i].
inline Vec sum_each(const Vec* v) {
  // hadd works in halves: lanes 0-3 of the sums come from the lower half of each v, lanes 4-7 from
  // the upper.
  const Vec a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  const Vec b = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

inline float sum(Vec v) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

inline float largest(Vec v) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

}  // namespace

#include "vec_dot.h"
