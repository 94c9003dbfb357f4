// SPDX-License-Identifier: Apache-2.0
// How scores are made from q and k: shared by the tiled and the one-shot calls.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>

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

}  // namespace tiledattn
