// StepShapes: what steps carried, counted by shape in a table of fixed size. Counts nothing until it is asked.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "llmc/llmc.h"

namespace llmc {

class StepShapes {
 public:
  static constexpr std::size_t kMost = LLMC_MAX_STEP_SHAPES;

  // Counts one step: the fields of `shape` but for struct_size, count and times are what it is known by.
  void Count(const llmc_step_shape& shape, uint64_t replay_ns) noexcept;
  // What was counted since the last call, in order of appearance, and how many steps found no room; begins anew.
  // `room` has capacity for kMost. On an exception nothing has changed.
  void Take(std::vector<llmc_step_shape>* room, uint64_t* lost);

 private:
  static constexpr uint16_t kFree = UINT16_MAX;
  static_assert(kMost < kFree);

  std::vector<llmc_step_shape> shapes_;
  std::vector<uint16_t> slots_;  // open addressing, half full at most; empty: nothing is counted
  uint64_t lost_ = 0;
};

}  // namespace llmc
