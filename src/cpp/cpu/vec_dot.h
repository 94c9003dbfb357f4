// SPDX-License-Identifier: Apache-2.0
// q times K in float32: the way of every element type for which an instruction set has nothing
// better.
#pragma once

namespace {

template <typename T>
struct WidenedDot {
  using Query = float;
  using Operand = Vec;
  using QueryOperand = Vec;
  static constexpr int kStep = kLanes;  ///< elements of head_dim in one operand

  static Operand load_query(const float* q) { return load(q); }
  static Operand load_key(const T* k) { return load(k); }
  static Operand load_key_first(const T* k, int n) { return load_first(k, n); }
  static Vec accumulate(Operand q, Operand k, Vec sums) { return fma(q, k, sums); }
};

/// Two vectors at a time. q stays in memory: with two vectors of each row it would fill the
/// registers.
template <typename T>
struct PairedDot {
  using Query = float;
  using QueryOperand = const float*;
  struct Operand {
    Vec v[2];
  };
  static constexpr int kStep = 2 * kLanes;

  static QueryOperand load_query(const float* q) { return q; }
  static Operand load_key(const T* k) {
    Operand key;
    load_vectors<2>(k, key.v);
    return key;
  }
  static Operand load_key_first(const T* k, int n) {
    if (n <= kLanes) return {{load_first(k, n), Vec{}}};
    return {{load(k), load_first(k + kLanes, n - kLanes)}};
  }
  static Vec accumulate(QueryOperand q, const Operand& k, Vec sums) {
    return fma(load(q + kLanes), k.v[1], fma(load(q), k.v[0], sums));
  }
};

/// Operands of products.inl have units of the size of a float, each with kElements of the dimension
/// that is summed up.
template <typename T>
struct Product {
  static constexpr int kElements = 1;
  static Vec multiply_add(Vec x, Vec y, Vec sum) { return fma(x, y, sum); }
};

template <typename T>
struct ByBFloat16;

template <typename T>
struct Dot : WidenedDot<T> {};
template <>
struct Dot<Float8> : PairedDot<Float8> {};

}  // namespace
