// SPDX-License-Identifier: Apache-2.0
#include "prefill/prefill_plain.cuh"

namespace tiledattn::cuda {

template void launch_prefill_plain<std::int8_t>(const AttendParams&, cudaStream_t);

}  // namespace tiledattn::cuda
