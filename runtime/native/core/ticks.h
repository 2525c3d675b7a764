// Ticks of the CPU's counter: cheaper to read than the clock, constant in rate, and synchronous on all cores. To
// convert to nanoseconds, read both around the same span.
#pragma once
#include <cstdint>

#include "core/clock.h"

namespace llmc {

inline uint64_t Ticks() {
#if defined(__x86_64__)
  __builtin_ia32_lfence();  // waits for earlier instructions: a kernel's last loads belong to the kernel
  return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
  uint64_t ticks;
  asm volatile("isb\n\tmrs %0, cntvct_el0" : "=r"(ticks));
  return ticks;
#else
  return MonotonicNs();
#endif
}

}  // namespace llmc
