// A test binary in fifty lines: TEST registers a function, CHECK compares and goes on, main runs all tests whose name
// contains the argument (all without one) and returns nonzero if any check failed.
//
//   #include "tests/check.h"
//   TEST(a_pin_holds) { CHECK_EQ(pins.count(), 1u); CHECK(pins.held()); }
#pragma once

#include <atomic>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

namespace kv::test {

struct Case {
  const char* name;
  void (*run)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

inline std::atomic<int> failures{0};  // checks may run on threads

template <class T>
void print(std::ostream& out, const T& value) {
  if constexpr (std::is_enum_v<T>)
    out << +static_cast<std::underlying_type_t<T>>(value);
  else if constexpr (requires { out << value; })
    out << value;
  else
    out << "(" << sizeof(T) << " bytes)";
}

inline bool report(bool ok, const char* file, int line, const char* text, const std::string& values = {}) {
  if (!ok && ++failures <= 50) std::fprintf(stderr, "%s:%d: %s%s\n", file, line, text, values.c_str());
  return ok;
}

template <class A, class B>
bool report_eq(const A& a, const B& b, const char* file, int line, const char* text) {
  if (a == b) return true;
  std::ostringstream values;
  values << ": ";
  print(values, a);
  values << " != ";
  print(values, b);
  return report(false, file, line, text, values.str());
}

}  // namespace kv::test

#define CHECK(condition) ::kv::test::report(static_cast<bool>(condition), __FILE__, __LINE__, #condition)
#define CHECK_EQ(a, b) ::kv::test::report_eq((a), (b), __FILE__, __LINE__, #a " == " #b)
#define TEST(name)                                                                              \
  static void test_##name();                                                                    \
  static const bool added_##name = (::kv::test::cases().push_back({#name, test_##name}), true); \
  static void test_##name()

#ifndef KV_FUZZ  // a fuzzer that uses the fixtures has a main of its own
int main(int argc, char** argv) {
  int ran = 0;
  for (const auto& test : ::kv::test::cases()) {
    if (argc > 1 && !std::strstr(test.name, argv[1])) continue;
    const int before = ::kv::test::failures;
    test.run();
    std::printf("%s %s\n", ::kv::test::failures == before ? "ok  " : "FAIL", test.name);
    std::fflush(stdout);
    ++ran;
  }
  std::printf("%d tests, %d failed checks\n", ran, ::kv::test::failures.load());
  return ran == 0 || ::kv::test::failures != 0;
}
#endif
