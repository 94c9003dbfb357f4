/* SPDX-License-Identifier: Apache-2.0
 * What the tests of the C interfaces check with. One file of a program includes it. */
#ifndef TILEDATTN_TESTS_C_CHECK_H
#define TILEDATTN_TESTS_C_CHECK_H

#include <stdio.h>
#include <string.h>

#include "tiledattn/c_api.h"

static int num_checks = 0;
static int num_failures = 0;

static void record(int good, const char* what, const char* file, int line) {
  const char* name = strrchr(file, '/');
  ++num_checks;
  if (good) return;
  ++num_failures;
  printf("%s:%d: %s (last error: %s)\n", name ? name + 1 : file, line, what,
         tiledattn_last_error());
}

#define CHECK(condition) record((condition) != 0, #condition, __FILE__, __LINE__)
#define CHECK_OK(call) record((call) == TILEDATTN_OK, #call, __FILE__, __LINE__)

/* The call fails with this code, and the message contains all parts. */
static void check_error(tiledattn_status got, tiledattn_status want, const char* part,
                        const char* other, const char* file, int line) {
  record(got == want, "another status than expected", file, line);
  record(strstr(tiledattn_last_error(), part) != NULL, part, file, line);
  record(strstr(tiledattn_last_error(), other) != NULL, other, file, line);
}
#define CHECK_ERROR(call, status, part, other) \
  check_error((call), (status), (part), (other), __FILE__, __LINE__)

/* Numbers from -1 to 1. */
static void fill(float* values, size_t count, unsigned seed) {
  size_t i;
  for (i = 0; i < count; ++i) {
    seed = seed * 1664525u + 1013904223u;
    values[i] = (float)(seed >> 8) / (float)(1u << 23) - 1.0f;
  }
}

#endif /* TILEDATTN_TESTS_C_CHECK_H */
