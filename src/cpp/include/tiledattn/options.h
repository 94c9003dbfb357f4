// SPDX-License-Identifier: Apache-2.0
// How scores are made from q and k: shared by the tiled and the one-shot calls.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <variant>

#include "tiledattn/tensor.h"

namespace tiledattn {

/// Which keys a query at position p sees: p - left .. p + right, both ends included. Nothing = no
/// bound on that side.
struct Window {
  std::optional<std::int64_t> left;
  std::optional<std::int64_t> right;
  bool bounded() const { return left.has_value() || right.has_value(); }
};

/// Order of operations: scale, softcap (cap * tanh(s / cap)), mask, sink.
struct ScoreOptions {
  std::optional<double> softmax_scale;  ///< nothing means 1 / sqrt(head_dim)
  double softcap = 0.0;                 ///< 0 switches it off
  Window window;
  std::optional<Tensor>
      sinks;  ///< [num_q_heads] float32: one extra logit for each query head, without a value
};

/// The scale of a quantised K or V pool (float8_e4m3fn or int8): one number > 0, or float32 on the
/// device of the call: one number, [num_kv_heads], [num_blocks, num_kv_heads] or [num_blocks,
/// block_size, num_kv_heads], any strides. A stored element counts as itself times its scale.
using KvScale = std::variant<double, Tensor>;

}  // namespace tiledattn
