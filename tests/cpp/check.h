// SPDX-License-Identifier: Apache-2.0
// A small test frame: TEST registers a function, CHECK* record what is wrong and go on, main runs
// all tests or those whose names contain the first argument. Included once in each executable.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

namespace test {

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

/// What the running test is about (device, type, case); printed with each failure.
inline std::string context;
/// How this executable was started, for tests that start it again.
inline std::string program;
inline int num_checks = 0;
inline int num_failures = 0;

inline void record(bool good, const char* file, int line, const std::string& what) {
  ++num_checks;
  if (good) return;
  if (++num_failures > 100) return;  // one fault in a loop must not bury the rest
  std::printf("%s:%d: [%s] %s\n", file, line, context.c_str(), what.c_str());
}

inline bool close(double got, double want, double tolerance) {
  if (std::isnan(want)) return std::isnan(got);
  if (std::isinf(want)) return got == want;
  return got == want || std::fabs(got - want) <= tolerance;
}

template <typename Exception, typename Body>
void check_throws(const char* file, int line, Body&& body, const std::vector<std::string>& parts) {
  try {
    body();
  } catch (const Exception& error) {
    const std::string message = error.what();
    for (const std::string& part : parts) {
      record(message.find(part) != std::string::npos, file, line,
             "message lacks \"" + part + "\": " + message);
    }
    return;
  } catch (const std::exception& error) {
    record(false, file, line, std::string("an error of another type: ") + error.what());
    return;
  }
  std::string wanted;
  for (const std::string& part : parts) wanted += " \"" + part + "\"";
  record(false, file, line, "no error; expected one that names" + wanted);
}

struct Registrar {
  Registrar(const char* name, void (*body)()) { tests().push_back({name, body}); }
};

}  // namespace test

#define TEST(name)                                           \
  static void name();                                        \
  static const test::Registrar register_##name{#name, name}; \
  static void name()

#define CHECK(condition) test::record(static_cast<bool>(condition), __FILE__, __LINE__, #condition)

#define CHECK_CLOSE(got, want, tolerance)                                                     \
  do {                                                                                        \
    const double got_ = (got), want_ = (want);                                                \
    test::record(test::close(got_, want_, tolerance), __FILE__, __LINE__,                     \
                 #got " is " + std::to_string(got_) + "; expected " + std::to_string(want_)); \
  } while (false)

/// The expression throws this type of error with a message that contains each of the parts.
#define CHECK_THROWS(Exception, expression, ...) \
  test::check_throws<Exception>(__FILE__, __LINE__, [&] { expression; }, {__VA_ARGS__})

int main(int argc, char** argv) {
  int num_run = 0;
  test::program = argv[0];
  for (const test::Test& each : test::tests()) {
    if (argc > 1 && std::strstr(each.name, argv[1]) == nullptr) continue;
    test::context = each.name;
    const int failures_before = test::num_failures;
    const int checks_before = test::num_checks;
    ++num_run;
    try {
      each.body();
    } catch (const std::exception& error) {
      test::record(false, each.name, 0, std::string("unexpected error: ") + error.what());
    }
    if (test::num_checks == checks_before) test::record(false, each.name, 0, "checked nothing");
    const bool good = test::num_failures == failures_before;
    std::printf("%s %s (%d checks)\n", good ? "ok    " : "FAILED", each.name,
                test::num_checks - checks_before);
    std::fflush(stdout);
  }
  std::printf("%d tests, %d checks, %d failures\n", num_run, test::num_checks, test::num_failures);
  return num_run > 0 && test::num_failures == 0 ? 0 : 1;
}
