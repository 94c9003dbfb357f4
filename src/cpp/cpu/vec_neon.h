// SPDX-License-Identifier: Apache-2.0
// NEON of any AArch64 CPU: 32 registers of four lanes.
#pragma once

#include <arm_neon.h>

#include "vec_generic.h"

namespace {

constexpr int kAccumulators = 16;
constexpr int kValueVectors = 4;
constexpr int kProductRows = 6;
constexpr int kProductVectors = 4;

inline Vec fma(Vec a, Vec b, Vec c) {
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}

inline Vec load(const Float16* p) {
  float16x4_t half;
  __builtin_memcpy(&half, p, sizeof half);
  return (Vec)vcvt_f32_f16(half);
}

}  // namespace

#include "vec_dot.h"
