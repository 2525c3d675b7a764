// What sums of all transports have in common: the order of their terms.
#pragma once
#include <cstdint>

#include "collective/collective.h"

namespace llmc {

inline void AddTo(float* to, const float* more, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) to[i] += more[i];
}

// Adds what comes behind the sum of the ranks to elements [begin, end) of the message; `sum` is that of element begin.
void AddBehindSum(const Reduction& work, float* sum, uint64_t begin, uint64_t end);

}  // namespace llmc
