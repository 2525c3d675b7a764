// The monotonic clock in nanoseconds.
#pragma once
#include <chrono>
#include <cstdint>

namespace llmc {

inline uint64_t MonotonicNs() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

}  // namespace llmc
