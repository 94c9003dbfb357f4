// SPDX-License-Identifier: Apache-2.0
#include "portable/portable.cuh"

namespace tiledattn::cuda {

template void launch_portable_dim<__half, 128>(PortableParams&, cudaStream_t);

}  // namespace tiledattn::cuda
