// SPDX-License-Identifier: Apache-2.0
#include "common/shared_limit.h"

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <utility>

#include "cuda_check.h"
#include "device_guard.h"

namespace tiledattn::cuda {

void allow_shared_bytes(const void* kernel, const char* name, std::size_t bytes) {
  struct Allowed {
    const void* kernel = nullptr;
    int device = 0;
    std::size_t bytes = 0;
  };
  thread_local Allowed last;  // most launches of a thread are of the same kernel
  const int device = DeviceGuard::current();
  if (last.kernel == kernel && last.device == device && last.bytes >= bytes) return;
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, std::size_t> allowed;
  const std::lock_guard<std::mutex> lock(mutex);
  std::size_t& known = allowed[{kernel, device}];
  if (known < bytes) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(bytes)),
          "cudaFuncSetAttribute", name);
    known = bytes;
  }
  last = {kernel, device, known};
}

}  // namespace tiledattn::cuda
