// SPDX-License-Identifier: Apache-2.0
// Memory that a backend uses between the kernels of one call.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "tiledattn/tensor.h"

namespace tiledattn {

/// Bytes on one device, owned, freed with the last copy of this handle; 256-byte aligned.
class TILEDATTN_API Buffer {
 public:
  Buffer() = default;
  /// Throws MemoryError (naming device and bytes) when there is not enough. On a GPU the contents
  /// are zero, on the CPU undefined.
  Buffer(Device device, std::int64_t bytes);
  void* data() const { return memory_.get(); }
  std::int64_t bytes() const { return bytes_; }
  Device device() const { return device_; }
  /// What keeps the memory alive, for captures and views that outlive this object.
  const std::shared_ptr<void>& owner() const { return memory_; }

 private:
  std::shared_ptr<void> memory_;
  std::int64_t bytes_ = 0;
  Device device_;
};

/// Scratch for one call at a time: partial results of split sequences. Calls that share one run one
/// after the other, in whatever threads and streams they are made.
class TILEDATTN_API Workspace {
 public:
  static constexpr std::int64_t kDefaultBytes = std::int64_t{32} << 20;
  explicit Workspace(Device device, std::int64_t bytes = kDefaultBytes);
  const Buffer& buffer() const { return buffer_; }
  Device device() const { return buffer_.device(); }
  /// As asked for. The buffer is a little larger: counters of the library stand behind.
  std::int64_t bytes() const { return bytes_; }

  /// Hold this while a call uses the workspace; work on `stream` starts after that of the call
  /// before.
  std::unique_lock<std::mutex> acquire(Stream stream);

 private:
  Buffer buffer_;
  std::int64_t bytes_ = 0;
  std::mutex mutex_;
  std::optional<Stream> last_;
};

}  // namespace tiledattn
