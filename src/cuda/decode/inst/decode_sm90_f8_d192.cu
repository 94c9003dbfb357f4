// SPDX-License-Identifier: Apache-2.0
#include "decode/decode_sm90.cuh"

namespace tiledattn::cuda {

template void launch_decode_sm90_instance<__nv_fp8_e4m3, 192, 8>(const DecodeSm90Params&,
                                                                 cudaStream_t);

}  // namespace tiledattn::cuda
