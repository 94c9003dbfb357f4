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

}  // namespace
