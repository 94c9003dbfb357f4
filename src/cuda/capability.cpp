// SPDX-License-Identifier: Apache-2.0
#include "capability.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <string>

#include "cuda_check.h"
#include "tiledattn/error.h"

namespace tiledattn::cuda {

namespace {

/// The most that TILEDATTN_CUDA_KERNELS allows.
int capability_wanted() {
  const char* const text = std::getenv("TILEDATTN_CUDA_KERNELS");
  const std::string wanted = text == nullptr || *text == 0 ? "best" : text;
  if (wanted == "best") return std::numeric_limits<int>::max();
  if (wanted == "portable") return 80;
  if (wanted == "plain") return 0;
  throw ValueError("TILEDATTN_CUDA_KERNELS: got '" + wanted +
                   "'; expected best, portable or plain");
}

int attribute(cudaDeviceAttr which, const char* name, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device),
        std::string("cudaDeviceGetAttribute of ") + name);
  return value;
}

}  // namespace

int compute_capability(int device) {
  const int wanted = capability_wanted();
  const int found =
      10 * attribute(cudaDevAttrComputeCapabilityMajor, "ComputeCapabilityMajor", device) +
      attribute(cudaDevAttrComputeCapabilityMinor, "ComputeCapabilityMinor", device);
  // Built for other architectures, the kernels of sm_90a are empty.
  const bool has_sm90a = std::string(TILEDATTN_CUDA_ARCHITECTURES).find("90a") != std::string::npos;
  return std::min(wanted, found == 90 && !has_sm90a ? 80 : found);
}

int num_multiprocessors() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return attribute(cudaDevAttrMultiProcessorCount, "MultiProcessorCount", device);
}

}  // namespace tiledattn::cuda
