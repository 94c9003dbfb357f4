// SPDX-License-Identifier: Apache-2.0
#define TILEDATTN_VEC "vec_neon.h"
#define TILEDATTN_TABLE kernels_neon
#define TILEDATTN_ISA "neon"
#include "skeleton.inl"
