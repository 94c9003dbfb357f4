// SPDX-License-Identifier: Apache-2.0
// q times K in float32: the way of every element type for which an instruction set has nothing
// better.
#pragma once

namespace {

template <typename T>
struct WidenedDot {
  using Query = float;
  using Operand = Vec;
  static constexpr int kStep = kLanes;  ///< elements of head_dim in one operand

  static Operand load_query(const float* q) { return load(q); }
  static Operand load_key(const T* k) { return load(k); }
  static Operand load_key_first(const T* k, int n) { return load_first(k, n); }
  static Vec accumulate(Operand q, Operand k, Vec sums) { return fma(q, k, sums); }
};

template <typename T>
struct Dot : WidenedDot<T> {};

}  // namespace
