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
constexpr int kProductRows = 8;
constexpr int kProductVectors = 2;

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

inline Vec load(const Int8* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

/// Sixteen float8 elements as float16.
inline __m256i widen_float8(__m128i bytes) {
  // Sign-extended and moved to one place below the top, a byte is the float16 but for bit 14: there
  // is a copy of the sign, and NaN alone (exponent and mantissa all ones) should have a one. Only
  // of NaN does the sum change that bit, so what has changed is what should be there.
  const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
  const __m256i sum = _mm256_add_epi16(words, _mm256_set1_epi16(0x0080));
  constexpr int kFirstXorOthersAnded = 0x78;
  return _mm256_ternarylogic_epi32(words, sum, _mm256_set1_epi16(0x4000), kFirstXorOthersAnded);
}

inline Vec load(const Float8* p) {
  return _mm512_cvtph_ps(widen_float8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

inline Vec load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
inline Vec load_first(const BFloat16* p, int n) {
  return widen_bfloat16(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
inline Vec load_first(const Float16* p, int n) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
inline Vec load_first(const Int8* p, int n) {
  const __m128i bytes = _mm_maskz_loadu_epi8(first_lanes(n), p);
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
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
