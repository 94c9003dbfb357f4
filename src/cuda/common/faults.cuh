// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "problem.h"

namespace tiledattn::cuda {

/// Keeps `fault` for the host unless another one is waiting there.
__device__ inline void record_fault(FaultRecord* record, const Fault& fault) {
  if (record == nullptr || atomicCAS_system(&record->claimed, 0, 1) != 0) return;
  record->fault = fault;
  __threadfence_system();
  *static_cast<volatile std::int32_t*>(&record->ready) = 1;
}

}  // namespace tiledattn::cuda
