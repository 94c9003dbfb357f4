// SPDX-License-Identifier: Apache-2.0
#include "decode/decode_plain.cuh"

namespace tiledattn::cuda {

template void launch_decode_plain<__nv_fp8_e4m3>(const AttendParams&, cudaStream_t);

}  // namespace tiledattn::cuda
