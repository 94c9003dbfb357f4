// SPDX-License-Identifier: Apache-2.0
// The binary layout of DLPack 1.x: what a capsule points to, and the function table that some array
// types carry.
#pragma once

#include <cstdint>

namespace tiledattn::dlpack {

enum DeviceType : std::int32_t {
  kCpu = 1,
  kCuda = 2,
  kCudaHost = 3,  // host memory pinned by CUDA
  kCudaManaged = 13,
};

constexpr std::uint64_t kReadOnly = 1;
constexpr std::uint64_t kCopied = 2;

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

struct Device {
  std::int32_t type;
  std::int32_t id;
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Array {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null means C order
  std::uint64_t byte_offset;
};

/// What a capsule named "dltensor" points to.
struct Managed {
  Array array;
  void* context;
  void (*deleter)(Managed* self);
};

/// What a capsule named "dltensor_versioned" points to.
struct ManagedVersioned {
  Version version;
  void* context;
  void (*deleter)(ManagedVersioned* self);
  std::uint64_t flags;
  Array array;
};

/// Functions of an array type, in a capsule "dlpack_exchange_api" that is its attribute
/// __dlpack_c_exchange_api__. Each returns 0, or -1 with a Python error set. Only the last two are
/// used here.
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  void (*allocate)();
  void (*export_managed)();
  void (*import_managed)();
  int (*describe)(void* object, Array* out);  // null where the type cannot do it
  int (*current_stream)(std::int32_t device_type, std::int32_t device_id, void** out);
};

}  // namespace tiledattn::dlpack
