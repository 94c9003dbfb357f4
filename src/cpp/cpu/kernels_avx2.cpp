// SPDX-License-Identifier: Apache-2.0
#define TILEDATTN_VEC "vec_avx2.h"
#define TILEDATTN_TABLE kernels_avx2
#define TILEDATTN_ISA "avx2"
#include "skeleton.inl"
