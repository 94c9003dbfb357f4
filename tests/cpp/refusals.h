// SPDX-License-Identifier: Apache-2.0
// Refused calls: a right call is spoiled in one way; the error names the argument, what came and
// what was wanted, nothing is written, and the right call still works.
#pragma once

#include <deque>
#include <functional>

#include "arrays.h"

namespace test {

/// One way to spoil a call that is right otherwise.
template <typename Args>
struct Refusal {
  enum Kind { kType, kValue, kIndex };
  Kind kind;
  std::function<void(Args&)> spoil;
  std::vector<std::string> parts;  ///< of the message: argument, what came, what was wanted
};

template <typename Args>
void check_refusals(const Args& right, const std::function<void(const Args&)>& call,
                    const std::vector<Refusal<Args>>& refusals, const Tensor& out) {
  const Host before = download(out);
  int number = 0;
  for (const Refusal<Args>& refusal : refusals) {
    Args args = right;
    refusal.spoil(args);
    context = "refusal " + std::to_string(number++) + " (" + refusal.parts[0] + ")";
    const auto body = [&] { call(args); };
    switch (refusal.kind) {
      case Refusal<Args>::kType:
        check_throws<TypeError>(__FILE__, __LINE__, body, refusal.parts);
        break;
      case Refusal<Args>::kValue:
        check_throws<ValueError>(__FILE__, __LINE__, body, refusal.parts);
        break;
      case Refusal<Args>::kIndex:
        check_throws<IndexError>(__FILE__, __LINE__, body, refusal.parts);
        break;
    }
    CHECK(same_bits(before, download(out)));
  }
  context = "the call that is right";
  call(right);
  CHECK(!same_bits(before, download(out)));
}

inline constexpr Device kGpu{DeviceKind::cuda, 0};
inline constexpr DType kBool = static_cast<DType>(0x0608);
inline constexpr DType kUint32 = static_cast<DType>(0x0120);
inline constexpr DType kFloat64 = static_cast<DType>(0x0240);

/// float32 numbers that live as long as the process.
inline Tensor floats(std::initializer_list<std::int64_t> shape) {
  static auto& arrays = *new std::deque<Array>;
  return arrays.emplace_back(Host(shape, 1), DType::float32, kCpu);
}

/// Makes both pools int8 and sets their scales.
template <typename Args>
void quantized(Args& args, std::optional<KvScale> k_scale = {},
               std::optional<KvScale> v_scale = {}) {
  args.k_pool.dtype = args.v_pool.dtype = DType::int8;
  args.k_scale = k_scale;
  args.v_scale = v_scale;
}

inline Tensor shortened(Tensor tensor) {  // one row fewer
  --tensor.shape[0];
  return tensor;
}

inline Tensor flattened(Tensor tensor) {  // the last dimension gone
  --tensor.rank;
  return tensor;
}

/// [B, 1, H, D] as [B, H, D].
inline Tensor without_tokens(Tensor tensor) {
  for (int axis = 1; axis + 1 < tensor.rank; ++axis) {
    tensor.shape[axis] = tensor.shape[axis + 1];
    tensor.strides[axis] = tensor.strides[axis + 1];
  }
  --tensor.rank;
  return tensor;
}

/// [B, H, D] as [B, 1, H, D].
inline Tensor with_tokens(Tensor tensor) {
  for (int axis = tensor.rank++; axis > 1; --axis) {
    tensor.shape[axis] = tensor.shape[axis - 1];
    tensor.strides[axis] = tensor.strides[axis - 1];
  }
  tensor.shape[1] = 1;
  return tensor;
}

inline Tensor misaligned(Tensor tensor) {
  tensor.data = static_cast<char*>(tensor.data) + 1;
  return tensor;
}

inline Tensor with_stride(Tensor tensor, int axis, std::int64_t stride) {
  tensor.strides[axis] = stride;
  return tensor;
}

/// So far apart that an element's offset in bytes leaves 64 bits.
inline Tensor far_apart(Tensor tensor) {
  tensor.strides[0] = std::int64_t{1} << 62;
  return tensor;
}

inline Tensor with_size(Tensor tensor, int axis, std::int64_t size) {
  tensor.shape[axis] = size;
  return tensor;
}

inline Tensor of_type(Tensor tensor, DType dtype) {
  tensor.dtype = dtype;
  return tensor;
}

inline Tensor on(Tensor tensor, Device device) {
  tensor.device = device;
  return tensor;
}

/// An index array that lives to the end of the run.
inline Tensor numbers(const std::vector<std::int64_t>& values, Shape shape = {}) {
  static std::deque<Array> kept;
  if (shape.empty()) shape = {static_cast<std::int64_t>(values.size())};
  kept.push_back(indices(shape, values, kCpu));
  return kept.back();
}

/// Scales of pools [5, 4, 2, ...], of float32 in a call that is right: none, one too many, of a
/// wrong type, shape, value or place.
template <typename Args>
void add_scale_refusals(std::vector<Refusal<Args>>& refusals) {
  using R = Refusal<Args>;
  const std::vector<R> more = {
      {R::kType,
       [](auto& a) { a.k_pool.dtype = DType::int8; },
       {"v_pool", "float32", "int8 like k_pool"}},
      {R::kValue, [](auto& a) { a.k_scale = 0.5; }, {"k_scale", "float32 pools", "None"}},
      {R::kValue,
       [](auto& a) { a.v_scale = numbers({1, 2}); },
       {"v_scale", "float32 pools", "None"}},
      {R::kValue, [](auto& a) { quantized(a); }, {"k_scale", "None", "num_kv_heads=2"}},
      {R::kValue,
       [](auto& a) { quantized(a, 0.5); },
       {"v_scale", "None", "[num_blocks=5, block_size=4, num_kv_heads=2]"}},
      {R::kValue, [](auto& a) { quantized(a, -0.5, 1.0); }, {"k_scale", "-0.5", "> 0"}},
      {R::kValue, [](auto& a) { quantized(a, 1.0, kNan); }, {"v_scale", "nan", "finite"}},
      {R::kType,
       [](auto& a) { quantized(a, 1.0, numbers({1, 2})); },
       {"v_scale", "int", "float32"}},
      {R::kValue,
       [](auto& a) { quantized(a, floats({5, 4}), 1.0); },
       {"k_scale", "[5, 4]", "[num_blocks=5, num_kv_heads=2]"}},
      {R::kValue,
       [](auto& a) { quantized(a, 1.0, on(floats({2}), kGpu)); },
       {"v_scale", "cuda:0", "cpu"}},
  };
  refusals.insert(refusals.end(), more.begin(), more.end());
}

}  // namespace test
