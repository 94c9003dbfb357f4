// SPDX-License-Identifier: Apache-2.0
// Prefill on Hopper: one block for each SM takes tiles of query rows until none is left.
//
// Of warpgroup 0, one thread finds work, two bring q and K with V into shared memory by TMA, and
// one warp clears values behind the end of a packed sequence or of a segment; paged K and V take a
// warp each. The other warpgroups are consumers: each owns 64 rows of the tile, with scores,
// weights and output in registers. In step n a consumer issues the scores of key tile n and, behind
// them, the product of tile n + 1's weights with its values; while that runs, it makes tile n's
// weights. Key tiles go from the last to the first, so that masked ones come first.
// docs/kernels/forward.md draws it.
#pragma once

#include <cstdint>

#include "common/dependents.cuh"
#include "common/launch.cuh"
#include "common/softmax_state.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "prefill/prefill_sm90.h"
#include "prefill/prefill_sm90_consumer.cuh"
#include "prefill/prefill_sm90_pages.cuh"
#include "prefill/prefill_sm90_producer.cuh"
#include "prefill/prefill_sm90_shared.cuh"

namespace tiledattn::cuda {

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    prefill_sm90(const __grid_constant__ PrefillSm90Params params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  PrefillSm90Shared<Config>& shared = *reinterpret_cast<PrefillSm90Shared<Config>*>(shared_bytes);
  // Uniform in the eyes of the compiler, or each matrix product gets code to make it so.
  const int warpgroup = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarpgroupSize, 0);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(params.q);
    prefetch_tensor_map(params.k);
    prefetch_tensor_map(params.v);
    prefetch_tensor_map(params.out);
    shared.init_barriers(params);
  }
  __syncthreads();
  wait_for_predecessor();
  // The blocks of a next call may take the places of those that have ended.
  start_dependents();
  if (warpgroup == 0) {
    give_registers_back<Config::kProducerRegisters>();
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const bool paged = params.page_rows > 0;
    if (threadIdx.x == 0 && !paged) load_all_keys<Config>(params, shared);
    if (warp == 0 && paged) load_paged_keys<Config>(params, shared);
    if (threadIdx.x == kWarpSize) find_all_work<Config>(params, shared);
    if (warp == 2 && paged) load_paged_values<Config>(params, shared);
    if (warp == 2 && params.clears_values && !paged) clear_all(shared);
    if (threadIdx.x == 3 * kWarpSize) load_queries<Config>(params, shared);
  } else {
    take_registers<Config::kConsumerRegisters>();
    Consumer<Config> consumer(params, shared, warpgroup - 1);
    consumer.run();
  }
#endif
}

template <typename Config>
void launch_prefill_sm90(const PrefillSm90Params& params, std::int64_t blocks,
                         cudaStream_t stream) {
  launch(prefill_sm90<Config>, "prefill_sm90",
         {blocks, Config::kThreads,
          shared_bytes_of_sm90<PrefillSm90Shared<Config>, Config::kBlocks>(), true},
         params, stream);
}

}  // namespace tiledattn::cuda
