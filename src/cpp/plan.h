// SPDX-License-Identifier: Apache-2.0
// Plans: which kernel runs a problem and how the work is cut. Pure functions of the problem's
// shape: testable with no GPU.
//
// A sequence's keys are cut into segments by its own visible length alone, and the partial results
// of segments are folded in the order of keys. So the bits of a sequence do not depend on its
// company, on the table's width or on the thread count.
#pragma once

#include <cstdint>
#include <limits>

#include "problem.h"

namespace tiledattn {

enum class Kernel : std::uint8_t {
  cpu_decode,
  cpu_prefill,
  cuda_decode_plain,
  cuda_prefill_plain,
  cuda_decode_portable,
  cuda_prefill_portable,
  cuda_decode_sm90,
  cuda_prefill_sm90,
};

const char* to_string(Kernel kernel);

/// Up to this many query tokens of each sequence, a call is decode: few rows, keys cut into
/// segments. More: prefill: many rows, most of which walk all their keys.
constexpr std::int64_t kMaxDecodeTokens = 16;
/// Keys of the shortest segment of decode, and the unit that longer ones are rounded to.
constexpr std::int64_t kSegmentKeys = 256;
/// Prefill on a GPU of up to this many query tokens is cut too, but a tile of rows needs more keys
/// to be worth a result of its own.
constexpr std::int64_t kMaxSplitPrefillTokens = 1024;
constexpr std::int64_t kPrefillSegmentUnit = 4096;
constexpr std::int64_t kMaxSegments = 64;
/// The partial results of one sequence stay below this.
constexpr std::int64_t kMaxSequenceScratch = std::int64_t{16} << 20;

/// How the keys of each sequence are cut.
struct SegmentCut {
  std::int64_t limit = 1;            ///< segments allowed by the rows of a sequence
  std::int64_t unit = kSegmentKeys;  ///< but for the last, segments are multiples of it
};

struct Plan {
  Kernel kernel = Kernel::cpu_decode;
  std::int64_t max_segments = 1;  ///< of any sequence of the call
  SegmentCut cut;
  std::int64_t sequence_bytes = 0;   ///< scratch of one sequence
  std::int64_t seqs_per_launch = 0;  ///< sequences whose scratch fits the workspace

  // cuda_decode_sm90: a slot holds the partial results of one KV head (and tile of rows) of one
  // sequence. Only what several teams of warps share needs one, so that any number of slots does.
  std::int64_t max_groups = 1;  ///< of any sequence of the call
  std::int64_t slot_bytes = 0;
  std::int64_t num_slots = 0;
  std::int64_t counters_offset = 0;  ///< in the workspace's memory
};

/// A launch of several.
struct AttentionStep {
  AttentionProblem problem;
  Plan plan;
};

/// Behind its own bytes a workspace has this many counters. They are zero between calls.
constexpr std::int64_t kWorkspaceCounters = 1024;

/// Where the counters of a workspace of `bytes` begin.
constexpr std::int64_t workspace_counters_offset(std::int64_t bytes) {
  return (bytes + 255) / 256 * 256;
}

/// With its counters it still has a number of bytes.
constexpr std::int64_t kLargestWorkspace =
    (std::numeric_limits<std::int64_t>::max() - kWorkspaceCounters * 4) / 256 * 256;

/// Floats before the columns of a partial result of cuda_decode_sm90: m, l and two that hold
/// nothing.
constexpr std::int64_t kDecodePartialHeader = 4;

/// Before the partial results of the plain kernels, scratch holds a flag for each sequence.
constexpr std::int64_t kFlagBytes = 4;
constexpr std::int64_t kFlagAlignment = 256;

constexpr std::int64_t flags_bytes(std::int64_t num_seqs) {
  return (num_seqs * kFlagBytes + kFlagAlignment - 1) / kFlagAlignment * kFlagAlignment;
}

/// Prefill on a GPU cuts the rows of each sequence into tiles of so many rows or more.
constexpr std::int64_t kFewestTileRows = 16;
constexpr std::int64_t kMaxRowTiles = (std::int64_t{1} << 31) - 1;  ///< where q is packed

/// Bytes of one partial result row: o, m and l, float32.
TILEDATTN_HOST_DEVICE std::int64_t partial_row_bytes(std::int64_t head_dim_v) {
  return (head_dim_v + 2) * 4;
}

/// Keys in each segment of a sequence that has `num_keys` visible keys.
template <typename Int>
TILEDATTN_HOST_DEVICE Int segment_keys(Int num_keys, SegmentCut cut) {
  const Int unit = static_cast<Int>(cut.unit);
  const Int limit = static_cast<Int>(cut.limit);
  const Int share = (num_keys + limit - 1) / limit;
  const Int rounded = (share + unit - 1) / unit * unit;
  return rounded < unit ? unit : rounded;
}

/// Segments of a sequence that has `num_keys` visible keys; 0 when it has none.
template <typename Int>
TILEDATTN_HOST_DEVICE Int num_segments(Int num_keys, SegmentCut cut) {
  if (num_keys <= 0) return 0;
  const Int keys = segment_keys(num_keys, cut);
  return (num_keys + keys - 1) / keys;
}

/// Where segment `index` begins among `num_keys` visible keys; that of the one behind the last is
/// their end.
template <typename Int>
TILEDATTN_HOST_DEVICE Int segment_begin(Int num_keys, Int index, SegmentCut cut) {
  const Int begin = index * segment_keys(num_keys, cut);
  return begin < num_keys ? begin : num_keys;
}

/// Segment `index` of the sequence's visible keys (of all its query tokens).
TILEDATTN_HOST_DEVICE KeyRange segment_range(const KeyRange& visible, std::int64_t index,
                                             SegmentCut cut) {
  const std::int64_t num_keys = visible.end - visible.begin;
  return {visible.begin + segment_begin(num_keys, index, cut),
          visible.begin + segment_begin(num_keys, index + 1, cut)};
}

/// Throws ValueError naming `workspace` when its bytes do not hold one sequence, or, on a GPU with
/// packed q, all. The compute capability is 90 for 9.0; below 80 only the plain kernels are chosen.
Plan make_plan(const AttentionProblem& problem, Device device, std::int64_t workspace_bytes,
               int compute_capability = 0);

/// Scratch that any decode call over `num_seqs` sequences with these sizes can use: what an object
/// reserves.
std::int64_t decode_workspace_bytes(std::int64_t num_seqs, std::int64_t q_len,
                                    std::int64_t num_q_heads, std::int64_t head_dim_v,
                                    std::int64_t max_keys);

}  // namespace tiledattn
