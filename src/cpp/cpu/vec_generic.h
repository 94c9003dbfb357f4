// SPDX-License-Identifier: Apache-2.0
// Four lanes by vector extensions and plain shuffles: common to the scalar set (which the compiler
// maps to the platform's baseline) and NEON.
#pragma once

#include <stdint.h>

namespace {

constexpr int kLanes = 4;

}  // namespace

#include "vec_common.h"

namespace {

/// lane i = sum of the lanes of v[i].
inline Vec sum_each(const Vec* v) {
  const Vec a = __builtin_shufflevector(v[0], v[1], 0, 4, 2, 6) +
                __builtin_shufflevector(v[0], v[1], 1, 5, 3, 7);
  const Vec b = __builtin_shufflevector(v[2], v[3], 0, 4, 2, 6) +
                __builtin_shufflevector(v[2], v[3], 1, 5, 3, 7);
  return __builtin_shufflevector(a, b, 0, 1, 4, 5) + __builtin_shufflevector(a, b, 2, 3, 6, 7);
}

inline float sum(Vec v) { return (v[0] + v[2]) + (v[1] + v[3]); }

inline float largest(Vec v) {
  const float a = v[0] > v[2] ? v[0] : v[2];
  const float b = v[1] > v[3] ? v[1] : v[3];
  return a > b ? a : b;
}

inline VecBits load_bits(const void* p) {
  VecHalf half;
  __builtin_memcpy(&half, p, sizeof half);
  return __builtin_convertvector(half, VecBits);
}

inline Vec load(const BFloat16* p) { return (Vec)(load_bits(p) << 16); }

/// Bytes with their sign.
inline VecInt load_bytes(const void* p) {
  VecByte bytes;
  __builtin_memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(bytes, VecInt);
}

inline Vec load(const Int8* p) { return __builtin_convertvector(load_bytes(p), Vec); }

/// As load_float16: the exponent has the bias of a half once the element is divided by 256.
inline Vec load(const Float8* p) {
  const VecBits bits = (VecBits)load_bytes(p);
  const VecBits magnitude = bits & 0x7f;
  const VecBits finite = (VecBits)((Vec)(magnitude << 20) * 0x1p112f);
  const VecBits value = magnitude == 0x7f ? VecBits{} + 0x7fc00000 : finite;
  return (Vec)(value | (bits & 0x80000000));
}

/// The exponent of a half is moved to float32's place and corrected by a product, which is exact
/// and also normalises subnormal halves.
inline Vec load_float16(const Float16* p) {
  const VecBits bits = load_bits(p);
  const VecBits magnitude = bits & 0x7fff;
  const VecBits finite = (VecBits)((Vec)(magnitude << 13) * 0x1p112f);
  const VecBits special = (magnitude << 13) | 0x7f800000;
  const VecBits value = magnitude >= 0x7c00 ? special : finite;
  return (Vec)(value | ((bits & 0x8000) << 16));
}

}  // namespace
