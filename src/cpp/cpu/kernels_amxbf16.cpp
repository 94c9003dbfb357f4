// SPDX-License-Identifier: Apache-2.0
#define TILEDATTN_VEC "vec_amxbf16.h"
#define TILEDATTN_TABLE kernels_amxbf16
#define TILEDATTN_ISA "amxbf16"
#include "skeleton.inl"
