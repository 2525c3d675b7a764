// Order of the terms in a sum, common to all transports.
#pragma once
#include <cstdint>

#include "collective/collective.h"

namespace llmc {

inline void AddTo(float* to, const float* more, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) to[i] += more[i];
}

// Adds bias and residual to elements [begin, end) of the message; `sum` points to element begin.
void AddBehindSum(const Reduction& work, float* sum, uint64_t begin, uint64_t end);

}  // namespace llmc
