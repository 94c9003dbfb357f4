// SPDX-License-Identifier: Apache-2.0
#include "check_tensor.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

namespace tiledattn {

namespace {

std::string describe(std::initializer_list<NamedSize> shape) {
  std::string text = "[";
  for (const NamedSize& dimension : shape) {
    if (text.size() > 1) text += ", ";
    text += dimension.name;
    if (dimension.size != kAnySize) text += "=" + std::to_string(dimension.size);
  }
  return text + "]";
}

void check_alignment(const char* argument, const Tensor& tensor) {
  const auto address = reinterpret_cast<std::uintptr_t>(tensor.data);
  const auto bytes =
      static_cast<std::uintptr_t>(std::max<std::int64_t>(item_bytes(tensor.dtype), 1));
  if (address % bytes != 0) {
    throw ValueError(std::string(argument) +
                     ": the data starts at an address that is not a multiple of its " +
                     std::to_string(bytes) + "-byte elements: pass an aligned copy");
  }
}

/// Counts of elements and bytes stay below this, far enough from 2^63 for a few to be added up.
constexpr double kMaxCount = 4e18;

/// The distance in bytes of the elements that are furthest from each other fits 64 bits, so every
/// offset does.
void check_span(const char* argument, const Tensor& tensor) {
  double elements = 1;
  for (int i = 0; i < tensor.rank; ++i) {
    elements += std::fabs(static_cast<double>(tensor.strides[i])) *
                static_cast<double>(tensor.shape[i] - 1);
  }
  if (elements * static_cast<double>(item_bytes(tensor.dtype)) < kMaxCount) return;
  Tensor strides = tensor;
  std::copy_n(tensor.strides, tensor.rank, strides.shape);
  refuse(argument, "strides " + shape_to_string(strides) + " with shape " + shape_to_string(tensor),
         "offsets of less than 4e18 bytes");
}

/// No two indices name the same element. For a tensor that check_memory has found right.
void check_no_overlap(const char* argument, const Tensor& tensor) {
  if (tensor.size() == 0) return;
  // Sorted by stride, each dimension has to step over everything that the smaller ones reach.
  int order[Tensor::kMaxRank];
  int count = 0;
  for (int i = 0; i < tensor.rank; ++i) {
    if (tensor.shape[i] > 1) order[count++] = i;
  }
  std::sort(order, order + count, [&](int a, int b) {
    return std::abs(tensor.strides[a]) < std::abs(tensor.strides[b]);
  });
  std::int64_t reach = 0;
  for (int i = 0; i < count; ++i) {
    const std::int64_t stride = std::abs(tensor.strides[order[i]]);
    if (stride <= reach) {
      throw ValueError(std::string(argument) + ": elements overlap in memory (stride " +
                       std::to_string(stride) + " in dimension " + std::to_string(order[i]) +
                       "); it is written to and must not");
    }
    reach += stride * (tensor.shape[order[i]] - 1);
  }
}

}  // namespace

std::string number_to_string(double number) {
  char text[32];
  int digits = 6;
  do {
    std::snprintf(text, sizeof text, "%.*g", digits, number);
  } while (++digits <= 17 && std::strtod(text, nullptr) != number);
  return text;
}

void check_sizes(const char* argument, const Tensor& tensor) {
  if (tensor.rank < 0 || tensor.rank > Tensor::kMaxRank) {
    refuse(argument, std::to_string(tensor.rank) + " dimensions",
           "0 to " + std::to_string(Tensor::kMaxRank));
  }
  double elements = 1;
  for (int i = 0; i < tensor.rank; ++i) {
    if (tensor.shape[i] < 0) refuse(argument, "shape " + shape_to_string(tensor), "sizes >= 0");
    // Without the zeros: products of some of the sizes have to fit as well.
    elements *= static_cast<double>(std::max<std::int64_t>(tensor.shape[i], 1));
  }
  if (elements < kMaxCount) return;
  refuse(argument, "shape " + shape_to_string(tensor), "less than 4e18 elements");
}

void refuse(const std::string& argument, const std::string& got, const std::string& expected) {
  throw ValueError(argument + ": got " + got + "; expected " + expected);
}

void check_rank(const char* argument, const Tensor& tensor, int rank, const char* shape) {
  check_sizes(argument, tensor);
  if (tensor.rank != rank) refuse(argument, "shape " + shape_to_string(tensor), shape);
}

void check_shape(const char* argument, const Tensor& tensor,
                 std::initializer_list<NamedSize> shape) {
  bool fits = tensor.rank == static_cast<int>(shape.size());
  int i = 0;
  for (const NamedSize& dimension : shape) {
    if (!fits) break;
    fits = dimension.size == kAnySize || tensor.shape[i] == dimension.size;
    ++i;
  }
  if (!fits) refuse(argument, "shape " + shape_to_string(tensor), describe(shape));
}

void check_device(const char* argument, const Tensor& tensor, Device device, const char* owner) {
  if (tensor.device == device) return;
  throw ValueError(std::string(argument) + ": is on " + to_string(tensor.device) + ", but " +
                   owner + " is on " + to_string(device) +
                   "; all arrays of a call must be on one device");
}

void check_memory(const char* argument, const Tensor& tensor) {
  check_sizes(argument, tensor);
  if (tensor.size() == 0) return;
  if (tensor.data == nullptr) refuse(argument, "no data (a null address)", "an array with memory");
  check_alignment(argument, tensor);
  check_span(argument, tensor);
}

void check_layout(const char* argument, const Tensor& tensor) {
  check_memory(argument, tensor);
  if (tensor.size() == 0) return;
  const int last = tensor.rank - 1;
  if (tensor.rank > 0 && tensor.shape[last] > 1 && tensor.strides[last] != 1) {
    throw ValueError(std::string(argument) + ": the last dimension has stride " +
                     std::to_string(tensor.strides[last]) +
                     "; its elements must be adjacent (stride 1): pass a contiguous copy");
  }
}

void check_writable_layout(const char* argument, const Tensor& tensor) {
  check_layout(argument, tensor);
  check_no_overlap(argument, tensor);
}

bool is_attention_dtype(DType dtype) {
  return dtype == DType::float32 || dtype == DType::float16 || dtype == DType::bfloat16;
}

void check_attention_dtype(const char* argument, const Tensor& tensor) {
  check_sizes(argument, tensor);
  if (is_attention_dtype(tensor.dtype)) return;
  throw TypeError(std::string(argument) + ": dtype is " + to_string(tensor.dtype) +
                  "; expected bfloat16, float16 or float32");
}

void check_same_dtype(const char* argument, const Tensor& tensor, DType dtype, const char* owner) {
  if (tensor.dtype == dtype) return;
  throw TypeError(std::string(argument) + ": dtype is " + to_string(tensor.dtype) + "; expected " +
                  to_string(dtype) + " like " + owner);
}

void check_float32(const char* argument, const Tensor& tensor) {
  check_sizes(argument, tensor);
  if (tensor.dtype == DType::float32) return;
  throw TypeError(std::string(argument) + ": dtype is " + to_string(tensor.dtype) +
                  "; expected float32");
}

IndexView check_index(const char* argument, const Tensor& tensor, Device device, const char* owner,
                      std::initializer_list<NamedSize> shape) {
  check_sizes(argument, tensor);
  if (tensor.dtype != DType::int32 && tensor.dtype != DType::int64) {
    throw TypeError(std::string(argument) + ": dtype is " + to_string(tensor.dtype) +
                    "; expected int32 or int64");
  }
  check_device(argument, tensor, device, owner);
  check_shape(argument, tensor, shape);
  check_memory(argument, tensor);
  // An empty array may come with a null address, which would read as "not given".
  static constexpr std::int64_t kEmpty = 0;
  IndexView view;
  view.data = tensor.data ? tensor.data : &kEmpty;
  view.row_stride = tensor.strides[0];
  view.column_stride = tensor.rank > 1 ? tensor.strides[1] : 0;
  view.is_int64 = tensor.dtype == DType::int64;
  return view;
}

void check_head_dim(const std::string& argument, std::int64_t head_dim) {
  if (head_dim >= 1 && head_dim <= kMaxHeadDim) return;
  refuse(argument, "head dimension " + std::to_string(head_dim),
         "1 to " + std::to_string(kMaxHeadDim));
}

void check_num_heads(const char* q, const char* k, std::int64_t num_q_heads,
                     std::int64_t num_kv_heads) {
  const bool both_empty = num_q_heads == 0 && num_kv_heads == 0;
  if (both_empty || (num_kv_heads > 0 && num_q_heads % num_kv_heads == 0)) return;
  refuse(q,
         std::to_string(num_q_heads) + " query heads with " + std::to_string(num_kv_heads) +
             " KV heads of " + k,
         "a multiple of the KV heads");
}

void check_output(const Tensor& out, DType q_dtype, Device device, const char* owner) {
  if (out.dtype != q_dtype && out.dtype != DType::float32) {
    const bool float32_q = q_dtype == DType::float32;
    throw TypeError("out: dtype is " + to_string(out.dtype) + "; expected " + to_string(q_dtype) +
                    " like q" + (float32_q ? "" : ", or float32"));
  }
  check_device("out", out, device, owner);
  check_writable_layout("out", out);
}

void check_lse(const Tensor& lse, const Tensor& out, Device device, const char* owner) {
  check_float32("lse", lse);
  check_device("lse", lse, device, owner);
  bool same = lse.rank == out.rank - 1;
  for (int i = 0; same && i < lse.rank; ++i) same = lse.shape[i] == out.shape[i];
  if (!same) {
    Tensor expected = out;
    --expected.rank;
    refuse("lse", "shape " + shape_to_string(lse), shape_to_string(expected) + " (out.shape[:-1])");
  }
  // Only the last dimension of q-like arrays has to be dense; lse may have any strides.
  check_memory("lse", lse);
  check_no_overlap("lse", lse);
}

PoolView pool_view(const Tensor& pool) {
  return {pool.data, pool.strides[0], pool.strides[1], pool.strides[2]};
}

}  // namespace tiledattn
