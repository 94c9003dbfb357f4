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

/// The same products of whole tiles in memory, where an instruction set has registers for those:
///
///   kSize      rows and columns of a product
///   kUnits     units that are summed up at once
///   Registers  lives as long as the others are used
///   multiply(a, a_stride, b, b_stride, units, c, c_stride)   c = a b: kSize rows of `units` units
///              by as many rows of kSize units; kUnits divides `units`; strides in floats
///   pair_transposed(from, from_stride, to, to_stride)   2 kUnits rows of kLanes floats to kLanes
///              rows of kUnits units, each of two rounded numbers of one column
template <typename T>
struct TileProduct {
  static constexpr bool kExists = false;
  static constexpr int kUnits = 1;
  struct Registers {};
};

template <typename T>
struct ByBFloat16;

template <typename T>
struct Dot : WidenedDot<T> {};
template <>
struct Dot<Float8> : PairedDot<Float8> {};

}  // namespace
