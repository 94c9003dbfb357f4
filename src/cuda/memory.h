// SPDX-License-Identifier: Apache-2.0
// Device memory and host-mapped memory, freed with their last owner.
#pragma once

#include <cstdint>
#include <memory>

namespace tiledattn::cuda {

/// Device memory, 256-byte aligned. MemoryError names bytes and device.
std::shared_ptr<void> allocate_device_memory(int device, std::int64_t bytes);

/// Zeroed pinned host memory that every device can address. MemoryError names bytes.
std::shared_ptr<void> allocate_mapped_memory(int device, std::int64_t bytes);

/// While one lives, this thread frees nothing: it may call no CUDA function, as in a graph's
/// destructor.
class NoCudaCalls {
 public:
  NoCudaCalls();
  ~NoCudaCalls();
  NoCudaCalls(const NoCudaCalls&) = delete;
  NoCudaCalls& operator=(const NoCudaCalls&) = delete;

 private:
  bool former_;
};

}  // namespace tiledattn::cuda
