// SPDX-License-Identifier: Apache-2.0
// CPUs that control groups grant, over folders that look like the kernel's.
#include "cpu/num_cpus.h"

#include <filesystem>
#include <fstream>

#include "check.h"

#if defined(__linux__)

#include <unistd.h>

using namespace tiledattn;
using namespace test;

namespace {

/// As many as no limit gives, or more.
constexpr int kMany = 1 << 16;

/// A folder of control groups, and the file that says which one the process is in.
class Groups {
 public:
  Groups()
      : root_(std::filesystem::temp_directory_path() /
              ("tiledattn-groups-" + std::to_string(getpid()) + "-" + std::to_string(++count))) {
    std::filesystem::create_directories(root_);
  }
  ~Groups() { std::filesystem::remove_all(root_); }
  Groups(const Groups&) = delete;
  Groups& operator=(const Groups&) = delete;

  Groups& write(const std::string& file, const std::string& text) {
    const std::filesystem::path path = root_ / file;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
    return *this;
  }
  int cpus() const { return cpu::num_cpus_by_quota(root_.string(), (root_ / "self").string()); }

 private:
  inline static int count = 0;
  std::filesystem::path root_;
};

}  // namespace

TEST(nothing_there_is_no_limit) { CHECK(Groups().cpus() >= kMany); }

TEST(the_group_of_the_process) {
  const auto cpus = [](const std::string& max) {
    return Groups().write("self", "0::/app\n").write("app/cpu.max", max).cpus();
  };
  CHECK(cpus("max 100000\n") >= kMany);
  CHECK(cpus("200000 100000\n") == 2);
  CHECK(cpus("150000 100000\n") == 2);  // rounded up: a part of a CPU is a CPU for a while
  CHECK(cpus("1000 100000\n") == 1);
  CHECK(cpus("50000 10000") == 5);
  CHECK(cpus("") >= kMany);
  CHECK(cpus("none of it\n") >= kMany);
  CHECK(cpus("-1 100000\n") >= kMany);
  CHECK(cpus("100000 0\n") >= kMany);
}

TEST(the_tightest_limit_on_the_way_to_the_root) {
  const auto cpus = [](const std::string& root, const std::string& outer,
                       const std::string& inner) {
    return Groups()
        .write("self", "1:name=systemd:/other\n0::/a/b\n")
        .write("cpu.max", root)
        .write("a/cpu.max", outer)
        .write("a/b/cpu.max", inner)
        .write("other/cpu.max", "100000 100000\n")
        .cpus();
  };
  CHECK(cpus("max 100000\n", "300000 100000\n", "400000 100000\n") == 3);
  CHECK(cpus("max 100000\n", "max 100000\n", "400000 100000\n") == 4);
  CHECK(cpus("200000 100000\n", "max 100000\n", "400000 100000\n") == 2);
}

TEST(version_1) {
  const auto cpus = [](const std::string& quota) {
    return Groups()
        .write("self", "4:cpu,cpuacct:/docker/1\n")
        .write("cpu/cpu.cfs_quota_us", quota)
        .write("cpu/cpu.cfs_period_us", "100000\n")
        .cpus();
  };
  CHECK(cpus("250000\n") == 3);
  CHECK(cpus("-1\n") >= kMany);
}

TEST(this_process_has_at_least_one) { CHECK(cpu::num_usable_cpus() >= 1); }

#endif
