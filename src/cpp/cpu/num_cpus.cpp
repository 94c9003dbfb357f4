// SPDX-License-Identifier: Apache-2.0
#include "cpu/num_cpus.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif

namespace tiledattn::cpu {
namespace {

#if defined(__linux__)

int num_cpus_by_affinity() {
  // Machines with more CPUs than a plain cpu_set_t holds need a larger set; the kernel says EINVAL
  // until it fits.
  for (int capacity = 1024; capacity <= 1 << 16; capacity *= 2) {
    cpu_set_t* set = CPU_ALLOC(static_cast<std::size_t>(capacity));
    if (set == nullptr) break;
    const std::size_t bytes = CPU_ALLOC_SIZE(static_cast<std::size_t>(capacity));
    const bool fits = sched_getaffinity(0, bytes, set) == 0;
    const int count = fits ? CPU_COUNT_S(bytes, set) : 0;
    CPU_FREE(set);
    if (fits) return count;
  }
  return static_cast<int>(std::thread::hardware_concurrency());
}

/// Quota / period in CPUs, rounded up; a large number when there is no limit.
int cpus_of_quota(double quota, double period) {
  constexpr int kUnlimited = 1 << 20;
  if (!(quota > 0) || !(period > 0)) return kUnlimited;
  return std::max(1, static_cast<int>(std::ceil(std::min(quota / period, double{kUnlimited}))));
}

/// The first line of a small file of the kernel's that is wanted; "" when there is none.
template <typename Wanted>
std::string find_line(const std::string& path, Wanted wanted) {
  const auto close = [](std::FILE* file) { std::fclose(file); };
  const std::unique_ptr<std::FILE, decltype(close)> file(std::fopen(path.c_str(), "r"), close);
  char buffer[4096];
  while (file && std::fgets(buffer, sizeof buffer, file.get()) != nullptr) {
    std::string line = buffer;
    while (!line.empty() && line.back() == '\n') line.pop_back();
    if (wanted(line)) return line;
  }
  return "";
}

std::string first_line(const std::string& path) {
  return find_line(path, [](const std::string&) { return true; });
}

/// cpu.max of one folder: "max 100000" or "150000 100000". What is no number counts as no limit.
int cpus_of_group(const std::string& folder) {
  const std::string line = first_line(folder + "/cpu.max");
  char* end = nullptr;
  const double quota = std::strtod(line.c_str(), &end);
  return cpus_of_quota(quota, std::strtod(end, nullptr));
}

#else

int num_cpus_by_affinity() { return static_cast<int>(std::thread::hardware_concurrency()); }

#endif

}  // namespace

#if defined(__linux__)

int num_cpus_by_quota(const std::string& root, const std::string& groups) {
  const auto is_version_2 = [](const std::string& line) { return line.rfind("0::", 0) == 0; };
  std::string path = find_line(groups, is_version_2);
  path.erase(0, 3);
  int cpus = cpus_of_group(root);
  while (path.size() > 1) {
    cpus = std::min(cpus, cpus_of_group(root + path));
    const std::size_t slash = path.rfind('/');
    path.resize(slash == std::string::npos ? 0 : slash);
  }
  // Version 1.
  const std::string quota = first_line(root + "/cpu/cpu.cfs_quota_us");
  const std::string period = first_line(root + "/cpu/cpu.cfs_period_us");
  return std::min(cpus, cpus_of_quota(std::strtod(quota.c_str(), nullptr),
                                      std::strtod(period.c_str(), nullptr)));
}

#endif

int num_usable_cpus() {
  int cpus = num_cpus_by_affinity();
#if defined(__linux__)
  cpus = std::min(cpus, num_cpus_by_quota("/sys/fs/cgroup", "/proc/self/cgroup"));
#endif
  return std::max(1, cpus);
}

}  // namespace tiledattn::cpu
