// SPDX-License-Identifier: Apache-2.0
// Quantised KV: which types pools may have, and what their scales may be.
#pragma once

#include <optional>

#include "problem.h"
#include "tiledattn/options.h"
#include "tiledattn/tensor.h"

namespace tiledattn {

/// Some element type of attention, or a quantised one.
void check_cache_dtype(const char* argument, const Tensor& tensor);

/// The type of a cache beside queries (or new tokens) of `dtype`: the same, or a quantised one.
void check_kv_dtype(const char* argument, DType kv_dtype, DType dtype, const char* owner);

/// Both pools have `dtype`, or both one of the quantised types. `owner` has `dtype`: "q".
void check_pool_dtypes(const Tensor& k_pool, const Tensor& v_pool, DType dtype, const char* owner);

/// The scale of a pool [num_blocks, block_size, num_kv_heads, ...] that has been checked already.
/// `owner`: what the device is compared with, as in "but q is on cuda:0".
ScaleView check_scale(const char* argument, const std::optional<KvScale>& scale, const Tensor& pool,
                      const char* owner);

}  // namespace tiledattn
