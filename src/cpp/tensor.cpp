// SPDX-License-Identifier: Apache-2.0
#include "tiledattn/tensor.h"

#include <charconv>
#include <cstdint>

#include "tiledattn/error.h"

namespace tiledattn {

std::string to_string(DType dtype) {
  switch (dtype) {
    case DType::bfloat16:
      return "bfloat16";
    case DType::float8_e4m3fn:
      return "float8_e4m3fn";
    default:
      break;
  }
  const int code = static_cast<int>(dtype) >> 8;
  const int bits = static_cast<int>(dtype) & 0xff;
  // DLPack's type codes, for the messages about types that the library does not take.
  constexpr const char* kNames[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
  if (code == 6) return "bool";
  if (code >= 0 && code < 7) return kNames[code] + std::to_string(bits);
  return "dlpack type " + std::to_string(code) + " with " + std::to_string(bits) + " bits";
}

std::string to_string(Device device) {
  return device.is_cpu() ? "cpu" : "cuda:" + std::to_string(device.index);
}

Device parse_device(const std::string& text) {
  if (text == "cpu") return {DeviceKind::cpu, 0};
  if (text == "cuda") return {DeviceKind::cuda, 0};
  const std::string prefix = "cuda:";
  if (text.rfind(prefix, 0) == 0) {
    int index = -1;
    const char* end = text.data() + text.size();
    const auto parsed = std::from_chars(text.data() + prefix.size(), end, index);
    if (parsed.ec == std::errc() && parsed.ptr == end && index >= 0)
      return {DeviceKind::cuda, index};
  }
  throw ValueError("device: got \"" + text + "\"; expected \"cpu\", \"cuda\" or \"cuda:N\"");
}

std::string shape_to_string(const Tensor& tensor) {
  std::string text = "[";
  for (int i = 0; i < tensor.rank; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(tensor.shape[i]);
  }
  return text + "]";
}

Tensor make_tensor(void* data, DType dtype, Device device,
                   std::initializer_list<std::int64_t> shape) {
  Tensor tensor;
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.device = device;
  for (const std::int64_t size : shape) {
    if (tensor.rank == Tensor::kMaxRank)
      throw ValueError("make_tensor: at most 6 dimensions are supported");
    tensor.shape[tensor.rank++] = size;
  }
  std::uint64_t stride = 1;  // unsigned, to overflow quietly: calls refuse such a shape
  for (int i = tensor.rank - 1; i >= 0; --i) {
    tensor.strides[i] = static_cast<std::int64_t>(stride);
    stride *= static_cast<std::uint64_t>(tensor.shape[i]);
  }
  return tensor;
}

}  // namespace tiledattn
