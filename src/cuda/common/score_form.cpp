// SPDX-License-Identifier: Apache-2.0
#include "common/score_form.h"

#include <numbers>

namespace tiledattn::cuda {

ScoreForm score_form(const AttentionProblem& p) {
  constexpr float kLog2E = std::numbers::log2e_v<float>;
  // Outside, scale * log2(e) times a score could leave float32.
  constexpr float kLeastScale = 1e-30f;
  constexpr float kMostScale = 1e30f;
  ScoreForm form;
  form.softmax_scale = p.softmax_scale;
  form.log2_scale = kLog2E;
  if (p.softcap > 0.0f) {
    form.transform = ScoreTransform::softcap;
    form.softcap = p.softcap;
    form.inverse_softcap = 1.0f / p.softcap;
  } else if (p.softmax_scale >= kLeastScale && p.softmax_scale <= kMostScale) {
    form.natural_scale = p.softmax_scale;
    form.log2_scale = p.softmax_scale * kLog2E;
  } else {
    form.transform = ScoreTransform::scale;
  }
  return form;
}

}  // namespace tiledattn::cuda
