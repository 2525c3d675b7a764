// ReadAhead: what a thread that waits brings into its cache of the weights that it reads next.
#pragma once
#include <cstdint>

namespace llmc {

struct ReadAhead {
  const char* at = nullptr;
  const char* end = nullptr;
  uint64_t stride = 0;  // to the second place that is read; 0: there is none

  // One line, of both places; false: nothing is left.
  bool Fetch() {
    constexpr uint64_t kLine = 64;
    if (at >= end) return false;
    __builtin_prefetch(at, 0, 2);
    if (stride != 0) __builtin_prefetch(at + stride, 0, 2);
    at += kLine;
    return true;
  }
};

}  // namespace llmc
