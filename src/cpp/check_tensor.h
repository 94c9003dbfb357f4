// SPDX-License-Identifier: Apache-2.0
// The pieces that the checks of every call are made of. Each names its argument, what came and what
// was wanted.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "problem.h"
#include "tiledattn/error.h"
#include "tiledattn/tensor.h"

namespace tiledattn {

/// One expected dimension: "num_seqs=4".
struct NamedSize {
  const char* name;
  std::int64_t size;
};

/// A dimension that may have any size.
constexpr std::int64_t kAnySize = -1;

/// "argument: got ...; expected ..." as ValueError.
[[noreturn]] void refuse(const std::string& argument, const std::string& got,
                         const std::string& expected);

/// As few digits as tell the number from its neighbours: "0.1", "1e-60", "nan".
std::string number_to_string(double number);

/// A rank and sizes that an array can have, and elements that 64 bits can count.
void check_sizes(const char* argument, const Tensor& tensor);
void check_rank(const char* argument, const Tensor& tensor, int rank, const char* shape);
void check_shape(const char* argument, const Tensor& tensor,
                 std::initializer_list<NamedSize> shape);
/// `owner`: what the device is compared with, as in "but q is on cuda:0".
void check_device(const char* argument, const Tensor& tensor, Device device, const char* owner);
/// There is memory, aligned to the type, and offsets fit 64 bits. Any strides.
void check_memory(const char* argument, const Tensor& tensor);
/// As check_memory; also elements of the last dimension are adjacent.
void check_layout(const char* argument, const Tensor& tensor);
/// As check_layout; also no two indices name the same element.
void check_writable_layout(const char* argument, const Tensor& tensor);
/// float32, float16 or bfloat16.
bool is_attention_dtype(DType dtype);
void check_attention_dtype(const char* argument, const Tensor& tensor);
void check_same_dtype(const char* argument, const Tensor& tensor, DType dtype, const char* owner);
void check_float32(const char* argument, const Tensor& tensor);
/// A vector or matrix of int32 or int64 on the device, as a view.
IndexView check_index(const char* argument, const Tensor& tensor, Device device, const char* owner,
                      std::initializer_list<NamedSize> shape);
void check_num_heads(const char* q, const char* k, std::int64_t num_q_heads,
                     std::int64_t num_kv_heads);
void check_head_dim(const std::string& argument, std::int64_t head_dim);

/// The checks of `out`: type of q or float32, device, layout.
void check_output(const Tensor& out, DType q_dtype, Device device, const char* owner);
/// The checks of `lse`: float32 with the shape out.shape[:-1].
void check_lse(const Tensor& lse, const Tensor& out, Device device, const char* owner);

/// The strides of [num_blocks, block_size, num_kv_heads, head_dim].
PoolView pool_view(const Tensor& pool);

}  // namespace tiledattn
