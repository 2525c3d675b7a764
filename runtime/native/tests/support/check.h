// CHECK macros of the native unit tests: print and count; a failure makes the exit status non-zero.
#pragma once
#include <atomic>
#include <cstdio>
#include <cstdlib>

namespace llmc_test {
inline std::atomic<int>& Failures() {
  static std::atomic<int> count{0};
  return count;
}
inline std::atomic<long>& Checks() {
  static std::atomic<long> count{0};
  return count;
}
inline bool Report(bool ok, const char* file, int line, const char* text) {
  ++Checks();
  // A failed check fails the process, also where main forgets to ask.
  if (!ok && Failures() == 0) std::atexit([] { std::_Exit(1); });
  if (!ok && ++Failures() <= 50) std::fprintf(stderr, "%s:%d: CHECK failed: %s\n", file, line, text);
  return ok;
}
inline int Finish(const char* name) {
  std::printf("%s: %ld checks, %d failures\n", name, Checks().load(), Failures().load());
  return Failures() == 0 && Checks() > 0 ? 0 : 1;
}
}  // namespace llmc_test

#define CHECK(...) ::llmc_test::Report(static_cast<bool>(__VA_ARGS__), __FILE__, __LINE__, #__VA_ARGS__)
#define CHECK_EQ(a, b) CHECK((a) == (b))
#define CHECK_OK(status)                                                                         \
  do {                                                                                           \
    auto check_status = (status);                                                                \
    if (!CHECK(check_status.ok())) std::fprintf(stderr, "  %s\n", check_status.message.c_str()); \
  } while (0)
