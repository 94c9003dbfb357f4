// SPDX-License-Identifier: Apache-2.0
#define TILEDATTN_VEC "vec_neonbf16.h"
#define TILEDATTN_TABLE kernels_neonbf16
#define TILEDATTN_ISA "neonbf16"
#include "skeleton.inl"
