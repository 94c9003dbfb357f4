// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "backend.h"

namespace tiledattn::cuda {

/// A FaultRecord in pinned host memory, which kernels write through the mapped address.
std::shared_ptr<FaultLog> make_fault_log(int device);

}  // namespace tiledattn::cuda
