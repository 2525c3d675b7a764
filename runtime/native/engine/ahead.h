// What a step has from its plan to its results. Two of them exist where steps overlap: one is on its way, and the next one
// is prepared behind it.
#pragma once
#include <cstdint>
#include <vector>

#include "device/batch.h"
#include "device/device.h"
#include "engine/scheduler.h"
#include "sampling/sampler.h"

namespace llmc {

struct EngineStep {
  // A row of the batch whose id is what a task of the step before draws.
  struct Drawn {
    uint32_t row, task;
  };
  static constexpr int32_t kNoGuess = -1;

  StepPlan plan;
  StepBatch batch;
  std::vector<Drawn> drawn;
  std::vector<SampleTask> tasks;
  std::vector<int32_t> guessed;  // for each task: the draw before it counts only if it gave this token; kNoGuess: none
  Fence fence = 0;
  bool launched = false;  // the scheduler counts its rows as on their way
  bool on_its_way = false;  // it was enqueued, and nobody has waited for it
  uint64_t scheduled_ns = 0, enqueued_ns = 0;
};

}  // namespace llmc
