// SPDX-License-Identifier: Apache-2.0
// XLA's foreign function interface (OpenXLA, xla/ffi/api/c_api.h), version 0.1, as far as a handler
// needs it. XLA accepts handlers of an older minor version and only ever appends to these structs.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tiledattn::xla {

constexpr int kMajorVersion = 0;
constexpr int kMinorVersion = 1;

struct Extension {
  std::size_t struct_size;
  std::int32_t type;
  Extension* next;
};
constexpr std::int32_t kMetadataExtension = 1;

struct ApiVersion {
  std::size_t struct_size;
  Extension* extensions;
  int major;
  int minor;
};

/// Filled in by a handler that is asked what it was built for.
struct Metadata {
  std::size_t struct_size;
  ApiVersion version;
  std::uint32_t traits;
};
struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

enum class ErrorCode : std::int32_t {
  invalid_argument = 3,
  resource_exhausted = 8,
  out_of_range = 11,
  internal = 13,
};
struct Error;
struct ErrorCreateArgs {
  std::size_t struct_size;
  Extension* extensions;
  const char* message;
  ErrorCode code;
};

enum class DataType : std::int32_t {
  pred = 1,
  s8 = 2,
  s32 = 4,
  s64 = 5,
  f16 = 10,
  f32 = 11,
  f64 = 12,
  bf16 = 16,
  f8e4m3fn = 20,
};

/// A dense array in C order.
struct Buffer {
  std::size_t struct_size;
  Extension* extensions;
  DataType dtype;
  void* data;
  std::int64_t rank;
  std::int64_t* dims;
};
constexpr std::int32_t kBufferArgument = 1;

struct ByteSpan {
  const char* data;
  std::size_t size;
};
struct Scalar {
  DataType dtype;
  void* value;
};
constexpr std::int32_t kScalarAttribute = 3;
constexpr std::int32_t kStringAttribute = 4;

/// Arguments or results.
struct Buffers {
  std::size_t struct_size;
  Extension* extensions;
  std::int64_t size;
  std::int32_t* types;
  void** buffers;
};
struct Attributes {
  std::size_t struct_size;
  Extension* extensions;
  std::int64_t size;
  std::int32_t* types;
  ByteSpan** names;
  void** values;
};

struct Context;
struct StreamGetArgs {
  std::size_t struct_size;
  Extension* extensions;
  Context* context;
  void* stream;
};
struct DeviceOrdinalGetArgs {
  std::size_t struct_size;
  Extension* extensions;
  Context* context;
  std::int32_t ordinal;
};

/// The runtime's functions; those that nothing here calls are only counted.
struct Api {
  std::size_t struct_size;
  Extension* extensions;
  ApiVersion version;
  void* internal;
  Error* (*create_error)(ErrorCreateArgs*);
  void* unused_before_stream[3];
  Error* (*get_stream)(StreamGetArgs*);
  void* unused_before_ordinal[12];
  Error* (*get_device_ordinal)(DeviceOrdinalGetArgs*);
};

struct CallFrame {
  std::size_t struct_size;
  Extension* extensions;
  const Api* api;
  Context* context;
  std::int32_t stage;
  Buffers arguments;
  Buffers results;
  Attributes attributes;
};

using Handler = Error*(CallFrame*);

}  // namespace tiledattn::xla
