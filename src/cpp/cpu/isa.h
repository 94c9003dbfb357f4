// SPDX-License-Identifier: Apache-2.0
// The choice of an instruction set, made once.
#pragma once

#include "cpu/kernels.h"

namespace tiledattn::cpu {

/// The kernels in use: the best that this CPU has, or those that TILEDATTN_CPU_ISA names
/// (ValueError when it cannot).
const CpuKernels& kernels();

}  // namespace tiledattn::cpu
