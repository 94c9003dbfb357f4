// SPDX-License-Identifier: Apache-2.0
// The GPUs that this build can use, found at the first question, not when the library is loaded.
#pragma once

#include <string>
#include <vector>

namespace tiledattn::cuda {

/// What never changes about a device.
struct DeviceFacts {
  std::string name;         ///< "NVIDIA H200 (sm_90)"
  int capability = 0;       ///< 10 * major + minor
  int multiprocessors = 0;  ///< streaming multiprocessors
};

struct Devices {
  std::vector<DeviceFacts> usable;  ///< by index
  std::string why_none;             ///< "" when there is one
};

/// Never throws but std::bad_alloc. Devices are the driver's first ones, up to the first that is
/// too old.
const Devices& devices();

}  // namespace tiledattn::cuda
