// SPDX-License-Identifier: Apache-2.0
// Which GPUs a build has code for: NVIDIA's compatibility rules (CUDA C++ Programming Guide,
// section on application compatibility).
#include "gpu_architectures.h"

#include "check.h"

using tiledattn::architecture_names;
using tiledattn::has_code_for;

TEST(machine_code_runs_on_later_gpus_of_its_major_version) {
  CHECK(has_code_for("80-real", 8, 0));
  CHECK(has_code_for("80-real", 8, 9));
  CHECK(!has_code_for("86-real", 8, 0));
  CHECK(!has_code_for("80-real", 9, 0));
  CHECK(!has_code_for("80-real", 7, 5));
}

TEST(ptx_runs_on_every_later_gpu) {
  CHECK(has_code_for("80-virtual", 8, 0));
  CHECK(has_code_for("80-virtual", 12, 1));
  CHECK(!has_code_for("90-virtual", 8, 9));
  CHECK(has_code_for("80", 8, 6));
  CHECK(has_code_for("80", 10, 0));
}

TEST(features_of_one_gpu_bind_the_code_to_it) {
  CHECK(has_code_for("90a-real", 9, 0));
  CHECK(!has_code_for("90a-real", 10, 0));
  CHECK(!has_code_for("90a-virtual", 10, 0));
  CHECK(!has_code_for("100a-real", 10, 3));
  CHECK(has_code_for("100f-real", 10, 3));
  CHECK(!has_code_for("100f-real", 12, 0));
}

TEST(any_entry_of_the_list_will_do) {
  const char* const list = "80-real 90a-real 100f-real 120-virtual";
  CHECK(has_code_for(list, 8, 6));
  CHECK(has_code_for(list, 9, 0));
  CHECK(has_code_for(list, 10, 3));
  CHECK(has_code_for(list, 12, 1));
  CHECK(!has_code_for(list, 11, 0));
  CHECK(!has_code_for("", 9, 0));
}

TEST(names_are_those_of_nvcc) {
  CHECK(architecture_names("80-real 90a-real 120-virtual") == "sm_80, sm_90a, compute_120");
  CHECK(architecture_names("").empty());
}
