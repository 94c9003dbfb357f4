// SPDX-License-Identifier: Apache-2.0
#include "decode/decode_sm90.cuh"

namespace tiledattn::cuda {

template void launch_decode_sm90_instance<std::int8_t, 64, 8>(const DecodeSm90Params&,
                                                              cudaStream_t);
template void launch_decode_sm90_instance<std::int8_t, 64, 16>(const DecodeSm90Params&,
                                                               cudaStream_t);

}  // namespace tiledattn::cuda
