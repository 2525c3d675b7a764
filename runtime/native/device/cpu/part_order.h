// PartOrder: a graph's commands for two parts of a step, in the order in which a team runs them. Each part runs up to a
// sum over the ranks; while that is on its way, the other part runs up to its own.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "device/cpu/cpu_program.h"

namespace llmc {

// A command of a part. A sum is listed twice: where it begins, and where its result is needed.
struct PartStep {
  enum class What : uint8_t { kRun, kBegin, kFinish };

  const CpuProgram::Step* step;
  std::size_t index;  // of the command among those of its part
  uint8_t part;  // 0 or 1, which is also the lane of its sums
  What what;
  bool meets;  // threads meet behind it
};

// Replaces *out by the order of two equal lists of commands, one for each part.
void OrderParts(const CpuProgram::StepRange& first, const CpuProgram::StepRange& second, std::vector<PartStep>* out);

}  // namespace llmc
