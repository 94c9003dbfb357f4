// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace tiledattn::cpu {

/// CPUs that this process may use: the smaller of its affinity mask and its control group's quota,
/// at least 1.
int num_usable_cpus();

}  // namespace tiledattn::cpu
