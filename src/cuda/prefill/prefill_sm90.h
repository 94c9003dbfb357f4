// SPDX-License-Identifier: Apache-2.0
// Instances of the Hopper prefill kernel, each compiled in a file of its own under inst/.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "prefill/prefill_sm90_config.h"

namespace tiledattn::cuda {

template <typename Config>
void launch_prefill_sm90(const PrefillSm90Params& params, std::int64_t blocks, cudaStream_t stream);

// Rows and keys of a tile, for each width of the head. Wide tiles read K and V less often; narrow
// ones waste less at the diagonal of a causal mask and where sequences are short. Keys are cut for
// few query tokens alone (plan.h), so the instances for many do without.
constexpr bool kWholeKeys = false;
template <typename T>
using PrefillSm90D64 = PrefillSm90Config<T, 64, 4, 64, false>;
template <typename T>
using PrefillSm90D64Long = PrefillSm90Config<T, 64, 3, 128, false, 1, kWholeKeys>;
template <typename T>
using PrefillSm90D64Short = PrefillSm90Config<T, 64, 1, 64, false, 3>;
template <typename T>
using PrefillSm90D64General = PrefillSm90Config<T, 64, 2, 128, true>;
template <typename T>
using PrefillSm90D96 = PrefillSm90Config<T, 96, 2, 128, false>;
template <typename T>
using PrefillSm90D128 = PrefillSm90Config<T, 128, 2, 128, false>;
template <typename T>
using PrefillSm90D128Long = PrefillSm90Config<T, 128, 3, 80, false, 1, kWholeKeys>;
template <typename T>
using PrefillSm90D128Short = PrefillSm90Config<T, 128, 1, 64, false, 2>;
template <typename T>
using PrefillSm90D128General = PrefillSm90Config<T, 128, 2, 128, true>;
template <typename T>
using PrefillSm90D192 = PrefillSm90Config<T, 192, 2, 112, false>;
template <typename T>
using PrefillSm90D256 = PrefillSm90Config<T, 256, 2, 80, false>;
template <typename T>
using PrefillSm90D256General = PrefillSm90Config<T, 256, 2, 64, true>;

}  // namespace tiledattn::cuda
