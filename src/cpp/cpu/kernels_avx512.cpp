// SPDX-License-Identifier: Apache-2.0
#define TILEDATTN_VEC "vec_avx512.h"
#define TILEDATTN_TABLE kernels_avx512
#define TILEDATTN_ISA "avx512"
#include "skeleton.inl"
