// SPDX-License-Identifier: Apache-2.0
#include "capability.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

#include "cuda_check.h"
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

int attribute(cudaDeviceAttr which, const char* name, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute", name);
  return value;
}

/// What never changes about a device, asked once.
struct DeviceFacts {
  int capability = 0;  ///< 10 * major + minor
  int multiprocessors = 0;
};

const DeviceFacts& facts(int device) {
  static std::mutex mutex;
  static std::map<int, DeviceFacts> all;
  const std::lock_guard<std::mutex> lock(mutex);
  DeviceFacts& known = all[device];
  if (known.capability == 0) {
    known.multiprocessors =
        attribute(cudaDevAttrMultiProcessorCount, "MultiProcessorCount", device);
    known.capability =
        10 * attribute(cudaDevAttrComputeCapabilityMajor, "ComputeCapabilityMajor", device) +
        attribute(cudaDevAttrComputeCapabilityMinor, "ComputeCapabilityMinor", device);
  }
  return known;
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

int num_multiprocessors() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return facts(device).multiprocessors;
}

}  // namespace tiledattn::cuda
