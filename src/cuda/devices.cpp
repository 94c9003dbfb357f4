// SPDX-License-Identifier: Apache-2.0
#include "devices.h"

#include "cuda_check.h"
#include "gpu_architectures.h"

namespace tiledattn::cuda {

namespace {

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

/// CUDA's own text is the same without a driver and with one that is too old.
std::string why_no_device(cudaError_t status) {
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) (void)cudaGetLastError();
  const std::string wanted =
      "this build needs one for CUDA " + version_text(CUDART_VERSION / 1000 * 1000) + " or newer";
  const std::string none = "no CUDA device can be used: ";
  if (driver == 0) return none + "no CUDA driver was found; " + wanted;
  return none + describe(status) + " (the installed driver supports CUDA " + version_text(driver) +
         "; " + wanted + ")";
}

Devices find_devices() {
  Devices found;
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    (void)cudaGetLastError();
    found.why_none = why_no_device(status);
    return found;
  }
  for (int index = 0; index < count; ++index) {
    cudaDeviceProp properties;
    const cudaError_t read = cudaGetDeviceProperties(&properties, index);
    if (read != cudaSuccess) {
      (void)cudaGetLastError();
      if (index == 0)
        found.why_none =
            "no CUDA device can be used: cudaGetDeviceProperties failed with " + describe(read);
      return found;
    }
    const std::string name = std::string(properties.name) + " (sm_" +
                             std::to_string(properties.major) + std::to_string(properties.minor) +
                             ")";
    // Devices keep the driver's numbers, so the first one that cannot be used ends the list.
    if (!has_code_for(TILEDATTN_CUDA_ARCHITECTURES, properties.major, properties.minor)) {
      if (index == 0) {
        found.why_none = "no CUDA device can be used: " + name +
                         " is not among the GPUs of this build (" +
                         architecture_names(TILEDATTN_CUDA_ARCHITECTURES) + ")";
      }
      return found;
    }
    found.usable.push_back(
        {name, 10 * properties.major + properties.minor, properties.multiProcessorCount});
  }
  if (count == 0) found.why_none = "no CUDA device can be used: the driver reports none";
  return found;
}

}  // namespace

const Devices& devices() {
  static const Devices found = find_devices();
  return found;
}

}  // namespace tiledattn::cuda
