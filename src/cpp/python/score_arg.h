// SPDX-License-Identifier: Apache-2.0
// The arguments that say how scores are made, common to all attention calls.
#pragma once

#include <nanobind/nanobind.h>

#include "scalar_arg.h"
#include "tensor_arg.h"
#include "tiledattn/options.h"

namespace tiledattn::binding {

inline ScoreOptions score_arg(TensorArgs& args, nanobind::handle softmax_scale,
                              nanobind::handle softcap, nanobind::handle window,
                              nanobind::handle sinks) {
  ScoreOptions options;
  options.softmax_scale = optional_number_arg(softmax_scale, "softmax_scale");
  options.softcap = number_arg(softcap, "softcap");
  options.window = window_arg(window);
  options.sinks = args.optional_input(sinks, "sinks");
  return options;
}

}  // namespace tiledattn::binding
