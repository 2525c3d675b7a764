// SimulatedStages: when each stage of a pipeline works on which step, in virtual time.
#pragma once
#include <cstdint>
#include <deque>
#include <vector>

namespace llmc {

inline constexpr uint32_t kMostSimulatedStages = 64;

// Each stage has an equal part of a step, and works on one step at a time, in the order in which they began. What it
// passes on lies in a place until the next stage takes it; it has as many places as steps may be in flight.
class SimulatedStages {
 public:
  // bus_share: what a stage takes of the memory bus of all stages while it only reads. 0: each has its own bus.
  SimulatedStages(uint32_t stages, uint32_t steps_in_flight, double bus_share);

  // Begins a step at `now`, a time that no earlier call has passed. ns: of all stages one after the other, each with a
  // bus of its own. read_ns: the part of it that reads. Returns when the first stage has passed it on.
  double Begin(double now, double ns, double read_ns);
  // Returns when the last stage has ended a step, or a later time that an earlier call returned. step: counted from 0.
  double End(uint64_t step);

  uint64_t num_steps() const { return num_steps_; }
  uint32_t steps_in_flight() const { return steps_in_flight_; }

 private:
  struct Step {
    double ns, use;  // of a stage: its time, and what it takes of the bus
  };
  struct Stage {
    uint64_t done = 0;  // steps that it has passed on
    bool working = false;  // on the step behind these, or it waits for a place for the result
    double left_ns = 0, use = 0;
    uint64_t begun() const { return done + working; }
  };
  bool GoOn(uint32_t index);
  void Settle();
  bool Work(double until);

  uint32_t steps_in_flight_;
  double bus_share_, now_ = 0;
  uint64_t num_steps_ = 0;
  std::deque<Step> steps_;  // that some stage has not begun, up to num_steps_
  std::vector<Stage> stages_;
};

}  // namespace llmc
