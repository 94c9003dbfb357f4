// SPDX-License-Identifier: Apache-2.0
// The memory in which a thread works on a tile of attention: packed q, the partial result of one
// segment of the keys, and the result of all segments so far.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "cpu/allocate.h"
#include "cpu/kernels.h"
#include "cpu/rows.h"

namespace tiledattn::cpu {

/// What a packed row of `size` elements takes.
inline std::int64_t padded(std::int64_t size) {
  return (size + kRowPadding - 1) / kRowPadding * kRowPadding;
}

/// Memory of one thread for one tile; kept between calls.
class Workbench {
 public:
  static Workbench& of_this_thread() {
    thread_local Workbench bench;
    return bench;
  }

  void reserve(std::int64_t rows_in_use, std::int64_t head_dim, std::int64_t head_dim_v) {
    const std::int64_t num_rows = padded(rows_in_use);
    const std::int64_t q_floats = num_rows * padded(head_dim);
    const std::int64_t o_floats = num_rows * padded(head_dim_v);
    const std::int64_t widened_floats = kBlockKeys * (padded(head_dim) + padded(head_dim_v));
    const auto floats =
        static_cast<std::size_t>(2 * q_floats + 2 * o_floats + 4 * num_rows + widened_floats) +
        kAlignment / sizeof(float);
    if (floats > size_) {
      allocate(floats * sizeof(float),
               [&] { memory_ = std::make_unique_for_overwrite<float[]>(floats); });
      size_ = floats;
    }
    void* start = memory_.get();
    std::size_t space = size_ * sizeof(float);
    q = static_cast<float*>(std::align(kAlignment, 1, start, space));
    partial = {q + q_floats + 2 * o_floats, q + q_floats + 2 * o_floats + num_rows, q + q_floats};
    total = {partial.l + num_rows, partial.l + 2 * num_rows, q + q_floats + o_floats};
    q_panels = total.l + num_rows;
    widened = q_panels + q_floats;
    o_stride = padded(head_dim_v);
  }

  Row partial_row(std::int64_t r) const {
    return {partial.m + r, partial.l + r, partial.o + r * o_stride};
  }
  Row total_row(std::int64_t r) const { return {total.m + r, total.l + r, total.o + r * o_stride}; }

  float* q = nullptr;  ///< packed q, or bfloat16 elements in the same place
  float* q_panels = nullptr;
  float* widened = nullptr;
  Row partial{};  ///< row 0 of a segment's result
  Row total{};    ///< row 0 of all segments' result
  std::int64_t o_stride = 0;

 private:
  static constexpr std::size_t kAlignment = 64;
  std::unique_ptr<float[]> memory_;
  std::size_t size_ = 0;
};

}  // namespace tiledattn::cpu
