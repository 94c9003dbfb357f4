// SPDX-License-Identifier: Apache-2.0
#include "prefill/prefill_sm90.cuh"

namespace tiledattn::cuda {

template void launch_prefill_sm90<PrefillSm90D128Long<__half>>(const PrefillSm90Params&,
                                                               std::int64_t, cudaStream_t);

}  // namespace tiledattn::cuda
