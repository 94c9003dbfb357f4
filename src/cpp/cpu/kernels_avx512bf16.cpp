// SPDX-License-Identifier: Apache-2.0
#define TILEDATTN_VEC "vec_avx512bf16.h"
#define TILEDATTN_TABLE kernels_avx512bf16
#define TILEDATTN_ISA "avx512bf16"
#include "skeleton.inl"
