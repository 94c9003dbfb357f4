// SPDX-License-Identifier: Apache-2.0
#define TILEDATTN_VEC "vec_scalar.h"
#define TILEDATTN_TABLE kernels_scalar
#define TILEDATTN_ISA "scalar"
#include "skeleton.inl"
