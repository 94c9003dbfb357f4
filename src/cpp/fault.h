// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backend.h"
#include "checks.h"

namespace tiledattn {

/// Throw what a device has found so far. `log` is null on the CPU, which finds nothing late.
inline void raise_fault(FaultLog* log) {
  if (log == nullptr) return;
  const Fault fault = log->take();
  if (fault.found()) throw_fault(fault);
}

}  // namespace tiledattn
