// SPDX-License-Identifier: Apache-2.0
// The GPUs that this build can use, found at the first question, not when the library is loaded.
#pragma once

#include <string>
#include <vector>

namespace tiledattn::cuda {

struct Devices {
  std::vector<std::string> names;  ///< "NVIDIA H200 (sm_90)", by index
  std::string why_none;            ///< "" when there is one
};

/// Never throws but std::bad_alloc. Devices are the driver's first ones, up to the first that is
/// too old.
const Devices& devices();

}  // namespace tiledattn::cuda
