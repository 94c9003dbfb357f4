// SPDX-License-Identifier: Apache-2.0
// AVX-512 with BF16: q times K of two bfloat16 elements a lane. Their products are exact in
// float32.
#pragma once

#include "vec_avx512.h"

#define TILEDATTN_PACKS_BFLOAT16 true

namespace {

template <>
struct Dot<BFloat16> {
  using Query = BFloat16;
  using Operand = __m512bh;
  using QueryOperand = __m512bh;
  static constexpr int kStep = 32;

  static Operand load_query(const BFloat16* q) { return (Operand)_mm512_loadu_si512(q); }
  static Operand load_key(const BFloat16* k) { return (Operand)_mm512_loadu_si512(k); }
  static Operand load_key_first(const BFloat16* k, int n) {
    return (Operand)_mm512_maskz_loadu_epi16((1u << n) - 1, k);
  }
  static Vec accumulate(Operand q, Operand k, Vec sums) { return _mm512_dpbf16_ps(sums, q, k); }
};

/// A unit is two elements, the first one in its lower half.
template <>
struct Product<BFloat16> {
  static constexpr int kElements = 2;
  static Vec multiply_add(Vec x, Vec y, Vec sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)y);
  }
  /// Units of two numbers each, rounded to the nearest.
  static Vec pair(Vec first, Vec second) {
    return join((__m256i)_mm512_cvtneps_pbh(first), (__m256i)_mm512_cvtneps_pbh(second));
  }
  static Vec pair(const BFloat16* first, const BFloat16* second) {
    return join(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(first)),
                _mm256_loadu_si256(reinterpret_cast<const __m256i*>(second)));
  }

 private:
  static Vec join(__m256i first, __m256i second) {
    const __m512i upper = _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16);
    return (Vec)_mm512_or_si512(_mm512_cvtepu16_epi32(first), upper);
  }
};

}  // namespace
