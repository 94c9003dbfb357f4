// SPDX-License-Identifier: Apache-2.0
#include "capability.h"

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <string>

#include "cuda_check.h"
#include "plan.h"
#include "tiledattn/error.h"

namespace tiledattn::cuda {

namespace {

std::string kernels_wanted() {
  const char* const text = std::getenv("TILEDATTN_CUDA_KERNELS");
  const std::string wanted = text == nullptr || *text == 0 ? "best" : text;
  if (wanted == "best" || wanted == "portable" || wanted == "plain") return wanted;
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
  const std::string wanted = kernels_wanted();
  if (wanted == "plain") return 0;
  if (wanted == "portable") return kPortableCapability;
  const int found =
      10 * attribute(cudaDevAttrComputeCapabilityMajor, "ComputeCapabilityMajor", device) +
      attribute(cudaDevAttrComputeCapabilityMinor, "ComputeCapabilityMinor", device);
  // Built for other architectures, the kernels of sm_90a are empty.
  const bool has_sm90a = std::string(TILEDATTN_CUDA_ARCHITECTURES).find("90a") != std::string::npos;
  return found == 90 && has_sm90a ? found : 0;
}

int num_multiprocessors() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return attribute(cudaDevAttrMultiProcessorCount, "MultiProcessorCount", device);
}

}  // namespace tiledattn::cuda
