// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace tiledattn::cuda {

/// Lets blocks of `kernel` have so many bytes of dynamic shared memory on the device that a
/// DeviceGuard has made current. The driver is asked only where it has not yet allowed as many.
void allow_shared_bytes(const void* kernel, const char* name, std::size_t bytes);

}  // namespace tiledattn::cuda
