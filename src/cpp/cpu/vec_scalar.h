// SPDX-License-Identifier: Apache-2.0
// The set that every CPU of the platform has: no instruction beyond the compiler's default target.
#pragma once

#include "vec_generic.h"

namespace {

constexpr int kAccumulators = 8;
constexpr int kValueVectors = 2;
constexpr int kProductRows = 6;
constexpr int kProductVectors = 2;

inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
inline Vec load(const Float16* p) { return load_float16(p); }

}  // namespace

#include "vec_dot.h"
