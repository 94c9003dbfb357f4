// SPDX-License-Identifier: Apache-2.0
// The GPUs that a build has code for, from CMake's list of architectures: "80-real 90a-real 120".
// Plain functions: testable with no GPU.
#pragma once

#include <algorithm>
#include <cctype>
#include <string>
#include <vector>

namespace tiledattn {

/// One entry of the list. Without "-real" or "-virtual" it stands for machine code and PTX.
struct Architecture {
  int major = 0;
  int minor = 0;
  char feature_set = ' ';  ///< 'a': this GPU alone; 'f': its family
  bool machine_code = true;
  bool ptx = true;
  std::string name;  ///< "90a"
};

inline std::vector<Architecture> parse_architectures(const std::string& cmake_list) {
  std::vector<Architecture> parsed;
  for (std::size_t begin = 0; begin < cmake_list.size();) {
    const std::size_t end = std::min(cmake_list.find(' ', begin), cmake_list.size());
    const std::string word = cmake_list.substr(begin, end - begin);
    begin = end + 1;
    Architecture one;
    one.name = word.substr(0, word.find('-'));
    one.machine_code = word.find("-virtual") == std::string::npos;
    one.ptx = word.find("-real") == std::string::npos;
    int number = 0;
    for (const char c : one.name) {
      if (std::isdigit(static_cast<unsigned char>(c)) != 0) {
        number = number * 10 + (c - '0');
      } else {
        one.feature_set = c;
      }
    }
    one.major = number / 10;
    one.minor = number % 10;
    if (number > 0) parsed.push_back(one);
  }
  return parsed;
}

/// "sm_80, sm_90a"; PTX alone is called compute_90.
inline std::string architecture_names(const std::string& cmake_list) {
  std::string names;
  for (const Architecture& one : parse_architectures(cmake_list)) {
    if (!names.empty()) names += ", ";
    names += (one.machine_code ? "sm_" : "compute_") + one.name;
  }
  return names;
}

/// Whether a GPU of this compute capability can run the build. Machine code runs on later GPUs of
/// the same major version, PTX on every later GPU; what uses features of one GPU ("a") runs on that
/// one, of a family ("f") on its later members.
inline bool has_code_for(const std::string& cmake_list, int major, int minor) {
  for (const Architecture& one : parse_architectures(cmake_list)) {
    const bool same = major == one.major && minor == one.minor;
    const bool later_of_major = major == one.major && minor >= one.minor;
    const bool later = major > one.major || later_of_major;
    const bool runs = one.feature_set == 'a' ? same
                      : one.feature_set == 'f'
                          ? later_of_major
                          : (one.machine_code && later_of_major) || (one.ptx && later);
    if (runs) return true;
  }
  return false;
}

}  // namespace tiledattn
