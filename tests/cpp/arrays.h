// SPDX-License-Identifier: Apache-2.0
// Arrays for tests: values on the host, and the same values in memory of a device in any type and
// layout.
#pragma once

#include <bit>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include "backend.h"
#include "check.h"
#include "tiledattn/tiledattn.h"

namespace test {

using namespace tiledattn;
using Shape = std::vector<std::int64_t>;

constexpr Device kCpu{DeviceKind::cpu, 0};
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// Values in C order.
struct Host {
  Shape shape;
  std::vector<float> values;

  Host() = default;
  explicit Host(Shape of, float value = 0) : shape(std::move(of)) {
    std::size_t size = 1;
    for (const std::int64_t n : shape) size *= static_cast<std::size_t>(n);
    values.assign(size, value);
  }
  float& operator[](std::int64_t i) { return values[static_cast<std::size_t>(i)]; }
  float operator[](std::int64_t i) const { return values[static_cast<std::size_t>(i)]; }
  std::int64_t size() const { return static_cast<std::int64_t>(values.size()); }
  /// Position of an element in `values`.
  std::int64_t at(std::initializer_list<std::int64_t> index) const {
    std::int64_t position = 0;
    std::size_t axis = 0;
    for (const std::int64_t i : index) position = position * shape[axis++] + i;
    return position;
  }
};

/// Numbers that are the same on every machine (splitmix64).
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  /// In [0, 1).
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  /// 0 .. n - 1.
  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(n));
  }
  /// Roughly normal with variance 1.
  float normal() {
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return static_cast<float>(sum);
  }
  Host normal(const Shape& shape) {
    Host host(shape);
    for (float& value : host.values) value = normal();
    return host;
  }
  /// 0 .. n - 1 in random order.
  std::vector<std::int64_t> permutation(std::int64_t n) {
    std::vector<std::int64_t> order(static_cast<std::size_t>(n));
    for (std::size_t i = 0; i < order.size(); ++i) {
      const auto j = static_cast<std::size_t>(below(static_cast<std::int64_t>(i) + 1));
      order[i] = order[j];
      order[j] = static_cast<std::int64_t>(i);
    }
    return order;
  }

 private:
  std::uint64_t state_;
};

/// Cut a float32's low `bits` bits off, to nearest, ties to even.
inline std::uint32_t rounded_bits(float value, int bits) {
  const auto pattern = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t half = 1u << (bits - 1);
  return (pattern + half - 1 + ((pattern >> bits) & 1)) >> bits;
}

inline std::uint16_t to_bfloat16(float value) {
  if (value != value) return 0x7fc0;
  return static_cast<std::uint16_t>(rounded_bits(value, 16));
}

inline float from_bfloat16(std::uint16_t pattern) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(pattern) << 16);
}

inline std::uint16_t to_float16(float value) {
  const auto sign = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16 & 0x8000);
  const float size = std::fabs(value);
  if (size != size) return 0x7e00;
  if (size >= 65520.0f) return sign | 0x7c00;
  // Below the normal numbers the steps are 2^-24.
  if (size < 0x1p-14f) {
    return sign | static_cast<std::uint16_t>(std::lrint(static_cast<double>(size) * 0x1p24));
  }
  return static_cast<std::uint16_t>(sign | (rounded_bits(size, 13) - (112u << 10)));
}

inline float from_float16(std::uint16_t pattern) {
  const float sign = pattern & 0x8000 ? -1.0f : 1.0f;
  const int exponent = pattern >> 10 & 31;
  const int fraction = pattern & 1023;
  if (exponent == 31) return fraction ? kNan : sign * kInf;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), -24);
  return sign * std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
}

inline void store(void* data, std::int64_t i, DType dtype, float value) {
  switch (dtype) {
    case DType::float32:
      static_cast<float*>(data)[i] = value;
      break;
    case DType::bfloat16:
      static_cast<std::uint16_t*>(data)[i] = to_bfloat16(value);
      break;
    case DType::float16:
      static_cast<std::uint16_t*>(data)[i] = to_float16(value);
      break;
    case DType::int32:
      static_cast<std::int32_t*>(data)[i] = static_cast<std::int32_t>(value);
      break;
    case DType::int64:
      static_cast<std::int64_t*>(data)[i] = static_cast<std::int64_t>(value);
      break;
    default:
      throw TypeError("store: dtype is " + to_string(dtype));
  }
}

inline float load(const void* data, std::int64_t i, DType dtype) {
  switch (dtype) {
    case DType::float32:
      return static_cast<const float*>(data)[i];
    case DType::bfloat16:
      return from_bfloat16(static_cast<const std::uint16_t*>(data)[i]);
    case DType::float16:
      return from_float16(static_cast<const std::uint16_t*>(data)[i]);
    default:
      throw TypeError("load: dtype is " + to_string(dtype));
  }
}

/// The values as this type holds them.
inline Host rounded(Host host, DType dtype) {
  std::uint64_t cell = 0;
  for (float& value : host.values) {
    store(&cell, 0, dtype, value);
    value = load(&cell, 0, dtype);
  }
  return host;
}

/// Calls f(position in C order, offset by strides) for each element.
template <typename F>
void each_element(const Tensor& tensor, F&& f) {
  const std::int64_t size = tensor.size();
  for (std::int64_t position = 0; position < size; ++position) {
    std::int64_t rest = position;
    std::int64_t offset = 0;
    for (int axis = tensor.rank - 1; axis >= 0; --axis) {
      offset += rest % tensor.shape[axis] * tensor.strides[axis];
      rest /= tensor.shape[axis];
    }
    f(position, offset);
  }
}

/// Elements from the first to one past the last; strides are not negative in these tests.
inline std::int64_t extent(const Tensor& tensor) {
  if (tensor.size() == 0) return 0;
  std::int64_t last = 0;
  for (int axis = 0; axis < tensor.rank; ++axis) {
    last += (tensor.shape[axis] - 1) * tensor.strides[axis];
  }
  return last + 1;
}

/// A tensor of this shape whose memory holds the dimensions in `order`, outermost first, the
/// innermost ones `padding` elements longer. `order` empty: as they are.
inline Tensor layout_of(const Shape& shape, DType dtype, Device device, std::vector<int> order = {},
                        std::int64_t padding = 0) {
  Tensor tensor;
  tensor.dtype = dtype;
  tensor.device = device;
  tensor.rank = static_cast<int>(shape.size());
  if (order.empty()) {
    for (int i = 0; i < tensor.rank; ++i) order.push_back(i);
  }
  std::int64_t stride = 1;
  for (std::size_t i = order.size(); i-- > 0;) {
    const int axis = order[i];
    tensor.shape[axis] = shape[static_cast<std::size_t>(axis)];
    tensor.strides[axis] = stride;
    stride *= tensor.shape[axis] + (i + 1 == order.size() ? padding : 0);
  }
  return tensor;
}

/// Memory on a device that a tensor lies in. What no element covers holds NaN bytes.
class Array {
 public:
  Array() = default;
  /// Like `layout`, `offset` elements into its memory.
  Array(const Host& host, Tensor layout, std::int64_t offset = 0) : tensor_(layout) {
    const std::int64_t bytes = (extent(layout) + offset) * item_bytes(layout.dtype);
    std::vector<unsigned char> image(static_cast<std::size_t>(bytes), 0xff);
    unsigned char* start = image.data() + offset * item_bytes(layout.dtype);
    each_element(layout, [&](std::int64_t position, std::int64_t element) {
      store(start, element, layout.dtype, host[position]);
    });
    buffer_ = Buffer(layout.device, bytes > 0 ? bytes : 1);
    backend_for(layout.device)
        .copy(buffer_.data(), layout.device, image.data(), kCpu, bytes, Stream{});
    tensor_.data = static_cast<char*>(buffer_.data()) + offset * item_bytes(layout.dtype);
  }
  Array(const Host& host, DType dtype, Device device)
      : Array(host, layout_of(host.shape, dtype, device)) {}

  const Tensor& tensor() const { return tensor_; }
  operator const Tensor&() const { return tensor_; }
  operator std::optional<Tensor>() const { return tensor_; }
  const Buffer& buffer() const { return buffer_; }

 private:
  Buffer buffer_;
  Tensor tensor_;
};

/// int32 or int64 numbers on a device.
inline Array indices(const Shape& shape, const std::vector<std::int64_t>& numbers, Device device,
                     DType dtype = DType::int32) {
  Array array(Host(shape), dtype, device);
  const std::vector<std::int32_t> narrow(numbers.begin(), numbers.end());
  const void* from = dtype == DType::int64 ? static_cast<const void*>(numbers.data())
                                           : static_cast<const void*>(narrow.data());
  const std::int64_t bytes = static_cast<std::int64_t>(numbers.size()) * item_bytes(dtype);
  backend_for(device).copy(array.tensor().data, device, from, kCpu, bytes, Stream{});
  return array;
}

/// What a tensor holds, after the work on its device has run.
inline Host download(const Tensor& tensor) {
  const Backend& backend = backend_for(tensor.device);
  backend.synchronize_device(tensor.device.index);
  const std::int64_t bytes = extent(tensor) * item_bytes(tensor.dtype);
  std::vector<unsigned char> image(static_cast<std::size_t>(bytes));
  if (bytes > 0) backend.copy(image.data(), kCpu, tensor.data, tensor.device, bytes, Stream{});
  Host host(Shape(tensor.shape, tensor.shape + tensor.rank));
  each_element(tensor, [&](std::int64_t position, std::int64_t element) {
    host[position] = load(image.data(), element, tensor.dtype);
  });
  return host;
}

inline bool same_bits(const Host& a, const Host& b) {
  if (a.shape != b.shape) return false;
  return a.values.empty() ||
         std::memcmp(a.values.data(), b.values.data(), a.values.size() * sizeof(float)) == 0;
}

/// The CPU, and the first GPU where there is one.
inline const std::vector<Device>& devices() {
  static const std::vector<Device> found = [] {
    std::vector<Device> all{kCpu};
    const std::string why = why_no_cuda();
    if (why.empty()) {
      all.push_back({DeviceKind::cuda, 0});
    } else {
      std::printf("no CUDA device: CPU only (%s)\n", why.c_str());
    }
    return all;
  }();
  return found;
}

}  // namespace test

/// A test that runs on every device, in the variable `device`.
#define DEVICE_TEST(name)                                         \
  static void name##_on(test::Device device);                     \
  TEST(name) {                                                    \
    for (const test::Device each : test::devices()) {             \
      test::context = std::string(#name) + " " + to_string(each); \
      name##_on(each);                                            \
    }                                                             \
  }                                                               \
  static void name##_on([[maybe_unused]] test::Device device)
