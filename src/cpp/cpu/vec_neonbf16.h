// SPDX-License-Identifier: Apache-2.0
// NEON with BF16. q times K of row by row work in fused steps that round as float32 does (BFMLALB,
// BFMLALT); the matrix products of many rows, whose weights are bfloat16 anyway, in pairs (BFDOT,
// which rounds sums to odd and takes subnormals for zero).
#pragma once

#include "vec_neon.h"

#define TILEDATTN_PACKS_BFLOAT16 true

namespace {

template <>
struct Dot<BFloat16> {
  using Query = BFloat16;
  using Operand = bfloat16x8_t;
  using QueryOperand = bfloat16x8_t;
  static constexpr int kStep = 8;

  static Operand load_query(const BFloat16* q) { return load_key(q); }
  static Operand load_key(const BFloat16* k) {
    Operand key;
    __builtin_memcpy(&key, k, sizeof key);
    return key;
  }
  static Operand load_key_first(const BFloat16* k, int n) {
    BFloat16 part[kStep] = {};
    __builtin_memcpy(part, k, static_cast<unsigned>(n) * sizeof(BFloat16));
    return load_key(part);
  }
  static Vec accumulate(Operand q, Operand k, Vec sums) {
    const float32x4_t even = vbfmlalbq_f32((float32x4_t)sums, q, k);
    return (Vec)vbfmlaltq_f32(even, q, k);
  }
};

/// Bytes have no product of their own with bfloat16: both become float32.
template <typename T>
struct WidenedByBFloat16 : WidenedDot<T> {
  using Query = BFloat16;
  static Vec load_query(const BFloat16* q) { return load(q); }
};
template <>
struct ByBFloat16<Int8> : WidenedByBFloat16<Int8> {};
template <>
struct ByBFloat16<Float8> : WidenedByBFloat16<Float8> {};

/// A unit is two elements, the first one in its lower half.
template <>
struct Product<BFloat16> {
  static constexpr int kElements = 2;
  static Vec multiply_add(Vec x, Vec y, Vec sum) {
    return (Vec)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)x, (bfloat16x8_t)y);
  }
  /// Units of two numbers each, rounded to the nearest.
  static Vec pair(Vec first, Vec second) {
    return zip((uint16x4_t)vcvt_bf16_f32((float32x4_t)first),
               (uint16x4_t)vcvt_bf16_f32((float32x4_t)second));
  }
  static Vec pair(const BFloat16* first, const BFloat16* second) {
    uint16x4_t a, b;
    __builtin_memcpy(&a, first, sizeof a);
    __builtin_memcpy(&b, second, sizeof b);
    return zip(a, b);
  }

 private:
  static Vec zip(uint16x4_t first, uint16x4_t second) {
    return (Vec)vcombine_u16(vzip1_u16(first, second), vzip2_u16(first, second));
  }
};

}  // namespace
