// StepShapes: loads of steps, counted by shape in a table of fixed size. Counts nothing until first read.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "llmc/llmc.h"

namespace llmc {

class StepShapes {
 public:
  static constexpr std::size_t kMost = LLMC_MAX_STEP_SHAPES;

  // Counts one step. The key is all fields of `shape` except struct_size, count and times.
  void Count(const llmc_step_shape& shape, uint64_t replay_ns) noexcept;
  // Counts since the last call, in order of appearance, and the number of steps that found no room; starts anew. `room`
  // has capacity for kMost. On an exception nothing has changed.
  void Take(std::vector<llmc_step_shape>* room, uint64_t* lost);

 private:
  static constexpr uint16_t kFree = UINT16_MAX;
  static_assert(kMost < kFree);

  std::vector<llmc_step_shape> shapes_;
  std::vector<uint16_t> slots_;  // open addressing, at most half full; empty: counting is off
  uint64_t lost_ = 0;
};

}  // namespace llmc
