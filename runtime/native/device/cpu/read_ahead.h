// ReadAhead: prefetches, during a wait, the weights that a thread reads next.
#pragma once
#include <cstdint>

namespace llmc {

struct ReadAhead {
  const char* at = nullptr;
  const char* end = nullptr;
  uint64_t stride = 0;  // distance to a second range; 0: there is none

  // Prefetches one line of each range; false: nothing is left.
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
