#include "device/simulated/simulated_stages.h"

#include <algorithm>
#include <limits>

namespace llmc {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

}  // namespace

SimulatedStages::SimulatedStages(uint32_t stages, uint32_t steps_in_flight, double bus_share)
    : steps_in_flight_(stages > 1 ? steps_in_flight : 1), bus_share_(stages > 1 ? bus_share : 0), stages_(stages) {}

double SimulatedStages::Begin(double now, double ns, double read_ns) {
  while (now_ < now && Work(now)) {
  }
  now_ = now;
  steps_.push_back({ns / static_cast<double>(stages_.size()), ns > 0 ? bus_share_ * read_ns / ns : 0});
  const uint64_t step = num_steps_++;
  Settle();
  while (stages_.front().done <= step && Work(kNever)) {
  }
  return now_;
}

double SimulatedStages::End(uint64_t step) {
  while (stages_.back().done <= step && Work(kNever)) {
  }
  return now_;
}

// Lets a stage pass its result on, or begin its next step, if it can. Returns whether it did.
bool SimulatedStages::GoOn(uint32_t index) {
  Stage& stage = stages_[index];
  if (stage.working) {
    const bool last = index + 1 == stages_.size();
    if (stage.left_ns > 0 || (!last && stages_[index + 1].begun() + steps_in_flight_ <= stage.done)) return false;
    stage.working = false;
    ++stage.done;
    return true;
  }
  if (stage.done == (index == 0 ? num_steps_ : stages_[index - 1].done)) return false;
  const Step& step = steps_[steps_.size() - (num_steps_ - stage.done)];
  stage.left_ns = step.ns;
  stage.use = step.use;
  stage.working = true;
  if (index + 1 == stages_.size()) steps_.pop_front();
  return true;
}

void SimulatedStages::Settle() {
  for (bool changed = true; changed;) {
    changed = false;
    for (uint32_t i = 0; i < stages_.size(); ++i) changed |= GoOn(i);
  }
}

// Works until a stage has done its part of a step, at most until `until`. Stages that want more than the whole bus become
// slower alike. Returns false if none works.
bool SimulatedStages::Work(double until) {
  double wanted = 0, least = kNever;
  for (const Stage& stage : stages_) wanted += stage.working && stage.left_ns > 0 ? stage.use : 0;
  const double slow = std::max(1.0, wanted);
  const auto lasts = [slow](const Stage& stage) { return stage.use > 0 ? stage.left_ns * slow : stage.left_ns; };
  for (const Stage& stage : stages_) {
    if (stage.working && stage.left_ns > 0) least = std::min(least, lasts(stage));
  }
  if (least == kNever) return false;
  const double takes = std::min(least, until - now_);
  for (Stage& stage : stages_) {
    if (!stage.working || stage.left_ns <= 0) continue;
    const double all = lasts(stage);
    stage.left_ns = all <= takes ? 0 : stage.left_ns * (1 - takes / all);
  }
  now_ += takes;
  Settle();
  return true;
}

}  // namespace llmc
