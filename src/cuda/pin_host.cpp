// SPDX-License-Identifier: Apache-2.0
#include "pin_host.h"

#include <string>

#include "cuda_check.h"
#include "device_guard.h"

namespace tiledattn::cuda {

namespace {

bool is_pinned(const void* address) {
  cudaPointerAttributes attributes{};
  const cudaError_t status = cudaPointerGetAttributes(&attributes, address);
  if (status != cudaSuccess) (void)cudaGetLastError();
  return status == cudaSuccess && attributes.type == cudaMemoryTypeHost;
}

void unpin(void* data) {
  try {
    const RelaxedCaptureMode relaxed;
    (void)cudaHostUnregister(data);
    (void)cudaGetLastError();
  } catch (...) {  // the driver has gone before us: nothing is pinned any more
  }
}

}  // namespace

std::shared_ptr<void> pin_host(void* data, std::int64_t bytes) {
  if (bytes <= 0) return nullptr;
  const RelaxedCaptureMode relaxed;
  if (is_pinned(data) && is_pinned(static_cast<char*>(data) + bytes - 1)) return nullptr;
  const cudaError_t status =
      cudaHostRegister(data, static_cast<std::size_t>(bytes), cudaHostRegisterPortable);
  check(status, "cudaHostRegister of " + std::to_string(bytes) + " bytes");
  return {data, unpin};
}

}  // namespace tiledattn::cuda
