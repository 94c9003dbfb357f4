// SPDX-License-Identifier: Apache-2.0
#include "check_quantized.h"

#include <cmath>
#include <string>

#include "check_tensor.h"
#include "tiledattn/error.h"

namespace tiledattn {

namespace {

/// "a number > 0, or float32 [num_kv_heads=8], ...".
std::string describe_scales(const Tensor& pool) {
  const std::string blocks = "num_blocks=" + std::to_string(pool.shape[0]);
  const std::string tokens = "block_size=" + std::to_string(pool.shape[1]);
  const std::string heads = "num_kv_heads=" + std::to_string(pool.shape[2]);
  return "a number > 0, or float32 [" + heads + "], [" + blocks + ", " + heads + "] or [" + blocks +
         ", " + tokens + ", " + heads + "]";
}

ScaleView check_scale_number(const char* argument, double number) {
  ScaleView view;
  view.all = static_cast<float>(number);
  if (!(view.all > 0.0f) || !std::isfinite(view.all))
    refuse(argument, number_to_string(number), "a finite float32 number > 0");
  return view;
}

ScaleView check_scale_array(const char* argument, const Tensor& scale, const Tensor& pool,
                            const char* owner) {
  check_float32(argument, scale);
  check_device(argument, scale, pool.device, owner);
  // The dimensions that a scale leaves out are the leading ones, and the tokens of a block.
  const int axes[4][3] = {{}, {2}, {0, 2}, {0, 1, 2}};
  bool fits = scale.rank <= 3;
  for (int i = 0; fits && i < scale.rank; ++i)
    fits = scale.shape[i] == pool.shape[axes[scale.rank][i]];
  if (!fits) refuse(argument, "shape " + shape_to_string(scale), describe_scales(pool));
  check_memory(argument, scale);

  ScaleView view;
  view.data = static_cast<const float*>(scale.data);
  std::int64_t* const strides[3] = {&view.block_stride, &view.token_stride, &view.head_stride};
  for (int i = 0; i < scale.rank; ++i) *strides[axes[scale.rank][i]] = scale.strides[i];
  view.by_key = scale.rank > 1;
  return view;
}

}  // namespace

void check_cache_dtype(const char* argument, const Tensor& tensor) {
  check_sizes(argument, tensor);
  const DType dtype = tensor.dtype;
  if (is_quantized(dtype) || is_attention_dtype(dtype)) return;
  throw TypeError(std::string(argument) + ": dtype is " + to_string(dtype) +
                  "; expected bfloat16, float16, float32, float8_e4m3fn or int8");
}

void check_kv_dtype(const char* argument, DType kv_dtype, DType dtype, const char* owner) {
  if (kv_dtype == dtype || is_quantized(kv_dtype)) return;
  throw TypeError(
      std::string(argument) + ": dtype is " + to_string(kv_dtype) + "; expected " +
      to_string(dtype) + " like " + owner +
      ", or float8_e4m3fn or int8 of a quantised cache (bytes are viewed as float8_e4m3fn first)");
}

void check_pool_dtypes(const Tensor& k_pool, const Tensor& v_pool, DType dtype, const char* owner) {
  check_sizes("k_pool", k_pool);
  check_sizes("v_pool", v_pool);
  check_kv_dtype("k_pool", k_pool.dtype, dtype, owner);
  check_same_dtype("v_pool", v_pool, k_pool.dtype, is_quantized(k_pool.dtype) ? "k_pool" : owner);
}

ScaleView check_scale(const char* argument, const std::optional<KvScale>& scale, const Tensor& pool,
                      const char* owner) {
  if (!is_quantized(pool.dtype)) {
    if (!scale) return {};
    refuse(argument, "a scale with " + to_string(pool.dtype) + " pools",
           "None: only float8_e4m3fn and int8 pools have scales");
  }
  if (!scale) {
    // float8 has an exponent of its own, so caches without scales are common; int8 has none.
    if (pool.dtype == DType::float8_e4m3fn) return {};
    refuse(argument, "None with int8 pools", describe_scales(pool));
  }
  if (const double* number = std::get_if<double>(&*scale))
    return check_scale_number(argument, *number);
  return check_scale_array(argument, std::get<Tensor>(*scale), pool, owner);
}

}  // namespace tiledattn
