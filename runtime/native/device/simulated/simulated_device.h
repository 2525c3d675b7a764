// SimulatedDevice: computes nothing. A replay advances a virtual clock by the cost of the graph under its load.
// Scheduler, block manager and the choice of graphs are those of production.
#pragma once
#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <vector>

#include "device/device.h"
#include "device/pool_kind.h"
#include "device/simulated/simulated_stages.h"

namespace llmc {

inline uint64_t MixBits(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// Cost of a replay in nanoseconds. A curve over token rows: linear between points, level before the first, and with the
// last slope behind the last. In addition a time for each pair of a new token and a token that it sees.
struct ReplayCost {
  std::vector<uint32_t> tokens;  // ascending; one point is a constant
  std::vector<double> ns;
  double ns_per_pair = 0;

  double operator()(uint32_t rows, double pairs) const;
};

// Cost of a graph, and its cost if it were made for exactly the load.
struct SimulatedGraph {
  ReplayCost cost, exact;
};

// Replays of one graph under loads of one size. Of decode steps, also of equally many rows.
struct SimulatedLoad {
  uint32_t graph = 0, num_seqs = 0;
  uint32_t length = 0;  // of the longest sequence: new tokens; in decode, context rounded up to blocks
  uint64_t replays = 0, tokens = 0;
  uint64_t contexts = 0;  // total context of all sequences
  double ns = 0, exact_ns = 0;
  uint64_t longest = 0;  // sum over replays of the longest sequence, not rounded
  uint64_t blocks = 0;  // KV blocks of all sequences
};

// What takes time beside the costs of graphs; see llmc_sim_model.
struct SimulatedTimes {
  double step_ns = 0, token_ns = 0;  // added to each replay, and for each of its samples
  double odds = 0;  // that the most likely token of a row is the guess; 0: logits are all 0
  double draft_ns = 0;  // of a guess for each sequence of a step
  uint32_t stages = 1, steps_in_flight = 1;
  double bus_share = 0, read_ns = 0;
};

class SimulatedDevice : public Device {
 public:
  // graphs: parallel to model.graphs.
  SimulatedDevice(ModelShape model, std::vector<SimulatedGraph> graphs, const PoolCounts& counts,
                  const SimulatedTimes& times);

  const ModelShape& model() const override { return model_; }
  uint32_t num_blocks() const override { return counts_.blocks; }
  uint32_t num_states() const override { return counts_.states; }
  Status Enqueue(const StepBatch& batch, Fence* fence) override;
  Status Wait(Fence fence, const float** logits) override;
  Overlap overlap() const override { return stages_.steps_in_flight() > 1 ? Overlap::kDisjoint : Overlap::kNone; }
  uint32_t steps_in_flight() const override { return stages_.steps_in_flight(); }
  Status CopyBlock(uint32_t, uint32_t) override { return Status::Ok(); }
  Status CopyState(uint32_t, uint32_t) override { return Status::Ok(); }

  double now_ns() const { return now_ns_; }
  uint64_t ClockNs() const override { return static_cast<uint64_t>(now_ns_); }
  int32_t made_up_guess() const override { return times_.odds > 0 ? kGuess : -1; }
  void AdvanceTo(double ns) { now_ns_ = ns > now_ns_ ? ns : now_ns_; }
  double busy_ns() const { return busy_ns_; }
  // Sorted by graph, sequences and length.
  std::vector<SimulatedLoad> Loads() const;

 private:
  static constexpr int32_t kGuess = 0, kOther = 1;
  struct InFlight {
    uint64_t number;
    uint32_t samples;
  };
  void DrawTokens(uint32_t rows);

  ModelShape model_;
  std::vector<SimulatedGraph> graphs_;
  PoolCounts counts_;
  SimulatedTimes times_;
  SimulatedStages stages_;
  std::deque<InFlight> in_flight_;
  double now_ns_ = 0, busy_ns_ = 0;
  uint64_t draws_ = 0;
  std::vector<float> logits_;
  std::map<std::array<uint32_t, 4>, SimulatedLoad> loads_;  // by graph, sequences, length and rows
};

}  // namespace llmc
