// SPDX-License-Identifier: Apache-2.0
// AVX-512 F, BW, DQ and VL: 32 registers of sixteen lanes.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns of its own "undefined" vectors in the header above, wherever they are inlined.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

namespace {

constexpr int kLanes = 16;
constexpr int kAccumulators = 16;
constexpr int kValueVectors = 4;

}  // namespace

#include "vec_common.h"

namespace {

inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }

inline Vec widen_bfloat16(__m256i half) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1); }

inline Vec load(const BFloat16* p) {
  return widen_bfloat16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Vec load(const Float16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

inline Vec load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
inline Vec load_first(const BFloat16* p, int n) {
  return widen_bfloat16(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
inline Vec load_first(const Float16* p, int n) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}

/// In each quarter of four lanes: the sums of v[0] to v[3]'s quarters.
inline Vec sum_quarters(const Vec* v) {
  const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
  const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
}

/// lane i = sum of the lanes of v[i].
inline Vec sum_each(const Vec* v) {
  const Vec a = sum_quarters(v), b = sum_quarters(v + 4), c = sum_quarters(v + 8),
            d = sum_quarters(v + 12);
  const __m512 ab =
      _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  const __m512 cd =
      _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
}

inline float sum(Vec v) { return _mm512_reduce_add_ps(v); }
inline float largest(Vec v) { return _mm512_reduce_max_ps(v); }

}  // namespace

#include "vec_dot.h"
