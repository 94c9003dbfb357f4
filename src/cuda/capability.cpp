// SPDX-License-Identifier: Apache-2.0
#include "capability.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <limits>
#include <string>
#include <string_view>

#include "device_guard.h"
#include "devices.h"
#include "tiledattn/error.h"

namespace tiledattn::cuda {

namespace {

/// The most that TILEDATTN_CUDA_KERNELS allows.
int capability_wanted() {
  const char* const text = std::getenv("TILEDATTN_CUDA_KERNELS");
  const std::string_view wanted = text == nullptr || *text == 0 ? "best" : text;
  if (wanted == "best") return std::numeric_limits<int>::max();
  if (wanted == "portable") return 80;
  if (wanted == "plain") return 0;
  throw ValueError("TILEDATTN_CUDA_KERNELS: got '" + std::string(wanted) +
                   "'; expected best, portable or plain");
}

/// Of a device that a call has chosen.
const DeviceFacts& facts(int device) {
  return devices().usable.at(static_cast<std::size_t>(device));
}

/// Built for other architectures, the kernels of sm_90a are empty.
constexpr bool kHasSm90a =
    std::string_view(TILEDATTN_CUDA_ARCHITECTURES).find("90a") != std::string_view::npos;

}  // namespace

int compute_capability(int device) {
  const int wanted = capability_wanted();
  const int found = facts(device).capability;
  return std::min(wanted, found == 90 && !kHasSm90a ? 80 : found);
}

int num_multiprocessors() { return facts(DeviceGuard::current()).multiprocessors; }

}  // namespace tiledattn::cuda
