// SPDX-License-Identifier: Apache-2.0
// What a caller hands in: arrays that the library does not own, devices and streams.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>

#include "tiledattn/export.h"

namespace tiledattn {

/// Element types, as DLPack's code * 256 + bits. Other values may occur in a Tensor; the checks
/// refuse them by name.
enum class DType : std::uint16_t {
  int8 = 0x0008,
  int32 = 0x0020,
  int64 = 0x0040,
  float16 = 0x0210,
  float32 = 0x0220,
  bfloat16 = 0x0410,
  float8_e4m3fn = 0x0a08,
};

/// Name of any element type, known to the library or not: "bfloat16", "uint32", "bool".
TILEDATTN_API std::string to_string(DType dtype);

/// Bytes of one element.
constexpr std::int64_t item_bytes(DType dtype) {
  return (static_cast<std::int64_t>(dtype) & 0xff) / 8;
}

/// The types of a quantised KV cache, which go with scales.
constexpr bool is_quantized(DType dtype) {
  return dtype == DType::float8_e4m3fn || dtype == DType::int8;
}

enum class DeviceKind : std::uint8_t { cpu, cuda };

/// A CPU (index 0) or one CUDA GPU.
struct Device {
  DeviceKind kind = DeviceKind::cpu;
  int index = 0;
  bool is_cpu() const { return kind == DeviceKind::cpu; }
  friend bool operator==(Device a, Device b) { return a.kind == b.kind && a.index == b.index; }
  friend bool operator!=(Device a, Device b) { return !(a == b); }
};

/// "cpu" or "cuda:0".
TILEDATTN_API std::string to_string(Device device);

/// The device that a description ("cpu", "cuda", "cuda:1") names; ValueError for any other text.
TILEDATTN_API Device parse_device(const std::string& text);

/// The best device present: the first CUDA GPU that this build can use, else the CPU.
TILEDATTN_API Device default_device();

/// A CUDA stream (cudaStream_t) to launch on; the default is the legacy default stream. Ignored on
/// the CPU. A TiledAttention, State or Workspace remembers the stream that it was last used on, for
/// later calls to be ordered after it: destroy the stream after them, or give it an `owner`.
struct Stream {
  void* handle = nullptr;
  std::shared_ptr<void> owner = {};  ///< remembered with the handle, and keeps the stream alive
};

/// An array somewhere in memory. Never owns; strides count elements; `data` is the address of the
/// first element.
struct Tensor {
  static constexpr int kMaxRank = 6;
  void* data = nullptr;
  DType dtype = DType::float32;
  Device device;
  int rank = 0;
  std::int64_t shape[kMaxRank] = {};
  std::int64_t strides[kMaxRank] = {};

  /// Number of elements; the largest int64 where there are more.
  std::int64_t size() const {
    for (int i = 0; i < rank; ++i) {
      if (shape[i] <= 0) return 0;
    }
    std::int64_t n = 1;
    for (int i = 0; i < rank; ++i) {
      if (n > INT64_MAX / shape[i]) return INT64_MAX;
      n *= shape[i];
    }
    return n;
  }
};

/// "[4, 32, 128]".
TILEDATTN_API std::string shape_to_string(const Tensor& tensor);

/// A tensor with C-order strides over `data`.
TILEDATTN_API Tensor make_tensor(void* data, DType dtype, Device device,
                                 std::initializer_list<std::int64_t> shape);

}  // namespace tiledattn
