// SPDX-License-Identifier: Apache-2.0
// AVX-512 with BF16 and VBMI: q times K of two bfloat16 elements a lane, whose products are exact
// in float32, and float8 by a table. bfloat16 holds every element of one byte.
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

template <>
struct ByBFloat16<Int8> : Dot<BFloat16> {
  static Operand load_key(const Int8* k) { return _mm512_cvtne2ps_pbh(load(k + kLanes), load(k)); }
  static Operand load_key_first(const Int8* k, int n) {
    const __m256i bytes = _mm256_maskz_loadu_epi8((1u << n) - 1, k);
    Int8 part[kStep];
    __builtin_memcpy(part, &bytes, sizeof part);
    return load_key(part);
  }
};

/// The bytes of the bfloat16 of each magnitude of a float8. As it is read divided by 256 none is
/// subnormal here: products of bfloat16 would take that for zero.
struct Float8Table {
  alignas(64) uint8_t lower[128];
  alignas(64) uint8_t upper[128];
};

constexpr Float8Table make_float8_table() {
  Float8Table table{};
  for (uint32_t magnitude = 0; magnitude < 128; ++magnitude) {
    const uint32_t exponent = magnitude >> 3, mantissa = magnitude & 7;
    float value = static_cast<float>(exponent == 0 ? mantissa : mantissa + 8) * 0x1p-17f;
    for (uint32_t e = 1; e < exponent; ++e) value *= 2;
    if (magnitude == 0x7f) value = __builtin_nanf("");
    const uint32_t bits = __builtin_bit_cast(uint32_t, value);
    table.lower[magnitude] = static_cast<uint8_t>(bits >> 16);
    table.upper[magnitude] = static_cast<uint8_t>(bits >> 24);
  }
  return table;
}

constexpr Float8Table kFloat8Table = make_float8_table();

inline __m512i look_up(const uint8_t* table, __m512i bytes) {  // by the lower seven bits
  return _mm512_permutex2var_epi8(_mm512_load_si512(table), bytes, _mm512_load_si512(table + 64));
}

/// 64 float8 elements as bfloat16: the first eight of every sixteen, and the last eight.
inline void widen_float8(__m512i bytes, __m512i* words) {
  constexpr int kFirstOrOthersAnded = 0xf8;
  const __m512i lower = look_up(kFloat8Table.lower, bytes);
  const __m512i upper = _mm512_ternarylogic_epi32(look_up(kFloat8Table.upper, bytes), bytes,
                                                  _mm512_set1_epi8(-128), kFirstOrOthersAnded);
  words[0] = _mm512_unpacklo_epi8(lower, upper);
  words[1] = _mm512_unpackhi_epi8(lower, upper);
}

template <int Count>
  requires(Count == 4)
inline void load_vectors(const Float8* p, Vec* v) {
  // What is unpacked twice comes out in the order of the elements if these are transposed by fours.
  const __m512i fours = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
  __m512i words[2];
  widen_float8(_mm512_permutexvar_epi32(fours, _mm512_loadu_si512(p)), words);
  for (int i = 0; i < 2; ++i) {
    v[2 * i] = (Vec)_mm512_unpacklo_epi16(__m512i{}, words[i]);
    v[2 * i + 1] = (Vec)_mm512_unpackhi_epi16(__m512i{}, words[i]);
  }
}

template <>
struct ByBFloat16<Float8> {
  using Query = BFloat16;
  using QueryOperand = const BFloat16*;
  struct Operand {
    __m512i words[2];
  };
  static constexpr int kStep = 64;

  static QueryOperand load_query(const BFloat16* q) { return q; }
  static Operand load_key(const Float8* k) { return widen(_mm512_loadu_si512(k)); }
  static Operand load_key_first(const Float8* k, int n) {
    return widen(_mm512_maskz_loadu_epi8((1ull << n) - 1, k));
  }
  static Vec accumulate(QueryOperand q, const Operand& k, Vec sums) {
    sums = _mm512_dpbf16_ps(sums, (__m512bh)_mm512_loadu_si512(q), (__m512bh)k.words[0]);
    return _mm512_dpbf16_ps(sums, (__m512bh)_mm512_loadu_si512(q + 32), (__m512bh)k.words[1]);
  }

 private:
  static Operand widen(__m512i bytes) {
    const __m512i eights = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);  // as in load_vectors
    Operand key;
    widen_float8(_mm512_permutexvar_epi64(eights, bytes), key.words);
    return key;
  }
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
