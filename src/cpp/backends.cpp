// SPDX-License-Identifier: Apache-2.0
#include "backend.h"

#include "tiledattn/error.h"

namespace tiledattn {

namespace {
constexpr const char* kNoKernels =
    "this build of tiledattn has no CUDA kernels; rebuild it with an nvcc at hand "
    "(TILEDATTN_CUDA=ON)";
}  // namespace

std::string why_no_cuda() {
  const Backend* cuda = cuda_backend();
  return cuda ? cuda->why_unavailable() : kNoKernels;
}

const Backend& backend_for(Device device) {
  if (device.is_cpu()) {
    if (device.index != 0)
      throw ValueError("device: got cpu:" + std::to_string(device.index) + "; there is one cpu");
    return cpu_backend();
  }
  const Backend* cuda = cuda_backend();
  const int count = cuda ? cuda->device_count() : 0;
  if (device.index >= 0 && device.index < count) return *cuda;
  const std::string why =
      count == 0 ? why_no_cuda()
                 : "this machine has " + std::to_string(count) + " usable CUDA device(s)";
  throw ValueError("device: got " + to_string(device) + ", but " + why);
}

Device default_device() {
  const Backend* cuda = cuda_backend();
  if (cuda && cuda->device_count() > 0) return {DeviceKind::cuda, 0};
  return {DeviceKind::cpu, 0};
}

}  // namespace tiledattn
