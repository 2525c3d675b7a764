// EngineStep: state of a step from its plan to its results. Two exist where steps overlap: one is in flight, and the
// next is prepared behind it, or even enqueued. Of disjoint steps there are as many as the device takes.
#pragma once
#include <cstdint>
#include <vector>

#include "device/batch.h"
#include "device/device.h"
#include "engine/scheduler.h"
#include "sampling/sampler.h"

namespace llmc {

struct EngineStep {
  static constexpr int32_t kNoGuess = -1;

  StepPlan plan;
  StepBatch batch;
  std::vector<DrawnRow> drawn;
  struct Placed {
    uint32_t row;
    const float* values;  // of a request in the plan
  };
  std::vector<Placed> placed;  // rows in place of tokens
  std::vector<SampleTask> tasks;
  std::vector<int32_t> guessed;  // [task]: counts only if the draw before it gave this token; kNoGuess: always
  Fence fence = 0;
  bool launched = false;  // the scheduler counts its rows as in flight
  bool on_its_way = false;  // enqueued, and not waited for yet
  uint64_t scheduled_ns = 0, enqueued_ns = 0;
};

}  // namespace llmc
