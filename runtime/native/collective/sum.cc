#include "collective/sum.h"

#include <algorithm>

namespace llmc {

void AddBehindSum(const Reduction& work, float* sum, uint64_t begin, uint64_t end) {
  if (work.bias != nullptr) {
    for (uint64_t i = begin; i < end;) {
      const uint64_t column = i % work.width, count = std::min(work.width - column, end - i);
      AddTo(sum + (i - begin), work.bias + column, count);
      i += count;
    }
  }
  if (work.residual != nullptr) AddTo(sum, work.residual + begin, end - begin);
}

}  // namespace llmc
