// SPDX-License-Identifier: Apache-2.0
// Checks that several calls share: score options and what devices find.
#include "checks.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "check_tensor.h"

namespace tiledattn {

namespace {

const char* to_string(FaultArgument argument) {
  switch (argument) {
    case FaultArgument::none:
      return "none";
    case FaultArgument::block_table:
      return "block_table";
    case FaultArgument::tile_blocks:
      return "tile_blocks";
    case FaultArgument::tile_block_counts:
      return "tile_block_counts";
    case FaultArgument::last_block_valid_slots:
      return "last_block_valid_slots";
    case FaultArgument::seq_lens:
      return "seq_lens";
    case FaultArgument::cu_seqlens_q:
      return "cu_seqlens_q";
    case FaultArgument::cu_seqlens_k:
      return "cu_seqlens_k";
    case FaultArgument::kv_positions:
      return "kv_positions";
    case FaultArgument::q_positions:
      return "q_positions";
    case FaultArgument::slot_mapping:
      return "slot_mapping";
  }
  return "unknown";
}

void check_window_side(const char* side, const std::optional<std::int64_t>& keys) {
  if (keys && *keys < 0)
    refuse("window", std::string(side) + " side " + std::to_string(*keys), "None or >= 0");
}

}  // namespace

void check_score_options(const ScoreOptions& options, Device device, std::int64_t num_q_heads) {
  if (options.softmax_scale && !std::isfinite(static_cast<float>(*options.softmax_scale))) {
    refuse("softmax_scale", number_to_string(*options.softmax_scale), "a finite float32 number");
  }
  if (!std::isfinite(static_cast<float>(options.softcap)) || options.softcap < 0 ||
      (options.softcap > 0 && static_cast<float>(options.softcap) == 0)) {
    refuse("softcap", number_to_string(options.softcap),
           "a finite float32 number >= 0 (0 switches it off)");
  }
  check_window_side("left", options.window.left);
  check_window_side("right", options.window.right);
  if (options.sinks) {
    check_float32("sinks", *options.sinks);
    check_shape("sinks", *options.sinks, {{"num_q_heads", num_q_heads}});
    check_device("sinks", *options.sinks, device, "the call");
    check_layout("sinks", *options.sinks);
  }
}

void set_score(AttentionProblem& problem, const ScoreOptions& options) {
  const double head_dim = static_cast<double>(problem.head_dim);
  problem.softmax_scale =
      static_cast<float>(options.softmax_scale.value_or(1.0 / std::sqrt(head_dim)));
  problem.softcap = static_cast<float>(options.softcap);
  problem.window_left = std::min(options.window.left.value_or(kNoWindow), kNoWindow);
  problem.window_right = std::min(options.window.right.value_or(kNoWindow), kNoWindow);
  problem.sinks = options.sinks ? static_cast<const float*>(options.sinks->data) : nullptr;
}

void throw_fault(const Fault& fault) {
  const std::string argument = to_string(fault.argument);
  const char* element = "sequence ";
  const char* what = "value";
  bool is_id = false;
  switch (fault.argument) {
    case FaultArgument::block_table:
    case FaultArgument::tile_blocks:
      what = "block id";
      is_id = true;
      break;
    case FaultArgument::slot_mapping:
      element = "token ";
      what = "slot";
      is_id = true;
      break;
    case FaultArgument::cu_seqlens_q:
    case FaultArgument::cu_seqlens_k:
      element = "entry ";
      break;
    default:
      break;
  }
  std::string message = argument + ": " + element + std::to_string(fault.sequence);
  if (fault.column >= 0) message += ", column " + std::to_string(fault.column);
  message += std::string(": got ") + what + " " + std::to_string(fault.value) + "; expected " +
             std::to_string(fault.minimum) + " to " + std::to_string(fault.maximum);
  if (fault.maximum < fault.minimum) message += " (there is none)";
  if (is_id) throw IndexError(message);
  throw ValueError(message);
}

}  // namespace tiledattn
