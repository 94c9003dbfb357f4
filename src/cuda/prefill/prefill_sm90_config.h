// SPDX-License-Identifier: Apache-2.0
// The Hopper prefill kernel's tiles, and the argument of its launches.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "common/attend_params.h"
#include "common/divisor.h"
#include "common/score_form.h"

namespace tiledattn::cuda {

/// One instance of the kernel. kDim: columns of q, K and V that the matrix products cover, both
/// head dims rounded up. kConsumers: warpgroups that compute, each 64 rows of q. kKeys: keys of a
/// tile. kGeneral: windows, softcap and any scale; without it causal masks and positive scales.
template <typename T_, int kDim_, int kConsumers_, int kKeys_, bool kGeneral_, int kBlocks_ = 1,
          bool kSplits_ = true>
struct PrefillSm90Config {
  using T = T_;
  static constexpr int kDim = kDim_;
  static constexpr int kConsumers = kConsumers_;
  static constexpr int kKeys = kKeys_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr int kBlocks = kBlocks_;  ///< on each SM

  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kSlabs = (kDim + 63) / 64;  ///< of 64 columns, in shared memory
  static constexpr int kThreads = 128 * (kConsumers + 1);
  /// Keys and values each go through a ring of this many tiles.
  static constexpr unsigned kStages = kConsumers == 4 ? 4 : 2;
  /// A block's registers, divided again: one warpgroup that loads, the others compute. What all
  /// take together must be there from the launch on, or they would wait for it without end.
  static constexpr int kProducerRegisters = kConsumers >= 3 || kBlocks == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 4   ? 112
                                            : kConsumers == 3 ? 160
                                            : kConsumers == 2 ? 232
                                            : kBlocks == 2    ? 216
                                                              : 128;
  static constexpr int kLaunchRegisters = 65536 / (kThreads * kBlocks) / 8 * 8;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                (1 + kConsumers) * kLaunchRegisters);

  /// Results leave through a tile of their own, or from the registers where shared memory is full.
  static constexpr bool kOwnOutput = kDim <= 128;
  /// With two tiles of q the first scores of the next tile of rows are made under the last product
  /// of this one.
  static constexpr unsigned kQueryPlaces = kDim <= 128 ? 2 : 1;
  /// Warpgroups take turns at the tensor cores. From 192 columns on, products are so long that the
  /// order takes care of itself.
  static constexpr bool kTurns = kDim <= 128 && kConsumers > 1;
  /// The output is rescaled between the issue of the next scores and that of the next product
  /// instead of behind it: this saves registers.
  static constexpr bool kLateRescale = kDim > 128;
  /// Steps without masks refer to the maximum of the steps before, which is there at once; their
  /// own, read from the packed weights, serves the next step. Weights then reach far above 1, which
  /// float16 does not. Where products are long the exponentials have time enough.
  static constexpr bool kLagged = kDim <= 128 && !kGeneral && std::is_same_v<T, __nv_bfloat16>;
  static constexpr bool kSplits = kSplits_;  ///< may work on a segment of the keys
  /// The first rows of a tile may see whole tiles of keys less than the last: each warpgroup passes
  /// over those that none of its rows sees.
  static constexpr bool kTall = kRows > kKeys && !kGeneral;
  /// ptxas moves the exponentials behind the wait for the running product unless something with a
  /// side effect hangs on them. How many rows of a thread it pays to keep in front, as measured.
  static constexpr int kAnchoredRows = kDim > 128                                    ? 2
                                       : kDim == 128 && (kConsumers == 2 || kLagged) ? 1
                                                                                     : 0;
};

struct PrefillSm90Params {
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap out;
  AttendParams attend;
  std::int32_t* counters = nullptr;  ///< next tile, finished blocks: 0 before and after a launch

  std::int32_t num_q_heads = 0;
  std::int32_t gqa_ratio = 0;

  // Paged K and V.
  std::int32_t page_rows = 0;   ///< tokens of a block that are moved at a time; 0 where not paged
  std::int32_t num_blocks = 0;  ///< of the pool
  Divisor block_size;

  /// What lies behind the last value of a sequence or segment is in reach, and may be anything.
  bool clears_values = false;

  // Tiles of rows. Packed q: the device knows how many there are.
  std::int32_t num_tiles = 0;
  std::int32_t tiles_per_head = 0;  ///< once for each segment of keys
  std::int32_t section_heads = 0;   ///< heads whose tiles go together

  std::int32_t window_left = 0;
  std::int32_t window_right = 0;  ///< 0 where causal

  ScoreForm scores;
  bool float_output = false;  ///< out is float32, written without TMA
};

/// Lengths and windows are 32-bit in the kernel; sums of two of them and a window must fit.
constexpr std::int64_t kMaxPrefillSm90Length = std::int64_t{1} << 29;

}  // namespace tiledattn::cuda
