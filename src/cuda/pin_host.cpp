// SPDX-License-Identifier: Apache-2.0
#include "pin_host.h"

#include <map>
#include <mutex>
#include <string>
#include <utility>

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

/// What this library has pinned, and how many hold each range: the same array may be pinned for
/// several owners, of which the last one unpins it. Never destroyed.
struct Registrations {
  std::mutex mutex;
  std::map<std::pair<void*, std::int64_t>, int> owners;
};

Registrations& registrations() {
  static Registrations& all = *new Registrations;
  return all;
}

void unpin(void* data, std::int64_t bytes) {
  Registrations& all = registrations();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto entry = all.owners.find({data, bytes});
  if (--entry->second > 0) return;
  all.owners.erase(entry);
  try {
    const RelaxedCaptureMode relaxed;
    (void)cudaHostUnregister(data);
    (void)cudaGetLastError();
  } catch (...) {  // the driver has gone before us: nothing is pinned any more
  }
}

void register_range(void* data, std::int64_t bytes) {
  const cudaError_t status =
      cudaHostRegister(data, static_cast<std::size_t>(bytes), cudaHostRegisterPortable);
  check(status, "cudaHostRegister of " + std::to_string(bytes) + " bytes");
}

}  // namespace

std::shared_ptr<void> pin_host(void* data, std::int64_t bytes) {
  if (bytes <= 0) return nullptr;
  const RelaxedCaptureMode relaxed;
  {
    Registrations& all = registrations();
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto known = all.owners.find({data, bytes});
    if (known == all.owners.end()) {
      if (is_pinned(data) && is_pinned(static_cast<char*>(data) + bytes - 1)) return nullptr;
      register_range(data, bytes);
      all.owners[{data, bytes}] = 1;
    } else {
      ++known->second;
    }
  }
  return {data, [bytes](void* pinned) { unpin(pinned, bytes); }};
}

}  // namespace tiledattn::cuda
