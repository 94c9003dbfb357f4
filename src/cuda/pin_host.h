// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>

namespace tiledattn::cuda {

/// Pins memory that others allocated, for every device and as long as the result lives; null where
/// it is pinned already. MemoryError or CudaError where the system refuses.
std::shared_ptr<void> pin_host(void* data, std::int64_t bytes);

}  // namespace tiledattn::cuda
