// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace tiledattn::cpu {

/// CPUs that this process may use: the smaller of its affinity mask and its control group's quota,
/// at least 1.
int num_usable_cpus();

/// CPUs that control groups grant, rounded up; very many where there is no limit. The tightest
/// limit counts on the way from the process's group (version 2, its path is in the file `groups`)
/// to the root, and that of version 1. Linux only.
int num_cpus_by_quota(const std::string& root, const std::string& groups);

}  // namespace tiledattn::cpu
