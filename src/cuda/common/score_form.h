// SPDX-License-Identifier: Apache-2.0
// How the tensor-core kernels make weights of the products q . k.
#pragma once

#include <cstdint>

#include "problem.h"

namespace tiledattn::cuda {

/// The maximum of a row may be kept while scores exceed it by less than a factor of 2^this: most
/// steps then rescale nothing. float16 holds such weights too, and their sums are float32.
constexpr float kStaleMaximum = 8.0f;
/// Up to here (as a power of two) rounding max s * log2_scale moves weights by less than 2^-13 of
/// themselves, and one fused operation is enough.
constexpr float kModerateMaximum = 1024.0f;

/// From dots to s, of which weights are made.
enum class ScoreTransform : std::int32_t {
  none,     ///< s is the dot; the scale is part of log2_scale
  scale,    ///< s = dot * softmax_scale
  softcap,  ///< s = softcap * tanh(dot * softmax_scale / softcap)
};

struct ScoreForm {
  ScoreTransform transform = ScoreTransform::none;
  float softmax_scale = 1.0f;
  float softcap = 1.0f;
  float inverse_softcap = 1.0f;
  float log2_scale = 1.0f;     ///< weights are 2^((s - max s) * log2_scale)
  float natural_scale = 1.0f;  ///< s * natural_scale is the score
};

ScoreForm score_form(const AttentionProblem& problem);

}  // namespace tiledattn::cuda
