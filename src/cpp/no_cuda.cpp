// SPDX-License-Identifier: Apache-2.0
// Linked instead of src/cuda when the build has no CUDA.
#include "backend.h"

namespace tiledattn {

const Backend* cuda_backend() { return nullptr; }

}  // namespace tiledattn
