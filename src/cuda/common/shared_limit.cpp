// SPDX-License-Identifier: Apache-2.0
#include "common/shared_limit.h"

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <utility>

#include "cuda_check.h"

namespace tiledattn::cuda {

void allow_shared_bytes(const void* kernel, const char* name, std::size_t bytes) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, std::size_t> allowed;
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  const std::lock_guard<std::mutex> lock(mutex);
  std::size_t& known = allowed[{kernel, device}];
  if (known >= bytes) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(bytes)),
        "cudaFuncSetAttribute", name);
  known = bytes;
}

}  // namespace tiledattn::cuda
