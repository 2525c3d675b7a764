// A device that computes nothing: a replay moves a virtual clock on by what the graph costs under the load it carries.
// Scheduler, block manager and the choice of graphs above it are those of production.
#pragma once
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "device/device.h"

namespace llmc {

// Nanoseconds of a replay: a curve over the token rows it carries, linear between its points, level before the first
// and on with the last slope behind the last; and a time for each pair of a new token and a token that it sees.
struct ReplayCost {
  std::vector<uint32_t> tokens;  // ascending; one point is a constant
  std::vector<double> ns;
  double ns_per_pair = 0;

  double operator()(uint32_t rows, double pairs) const;
};

// What a graph takes, and what it would take were it made for exactly the load.
struct SimulatedGraph {
  ReplayCost cost, exact;
};

// Replays of one graph under loads of one size.
struct SimulatedLoad {
  uint32_t graph = 0, num_seqs = 0;
  uint32_t length = 0;  // of the longest sequence: new tokens; in decode, tokens of context rounded up to blocks
  uint64_t replays = 0, tokens = 0;
  uint64_t contexts = 0;  // tokens of context of all sequences
  double ns = 0, exact_ns = 0;
  uint64_t longest = 0;  // sum of the longest sequence of each replay, not rounded
};

class SimulatedDevice : public Device {
 public:
  // graphs: one for each of model.graphs. step_ns, token_ns: beside each replay, and for each of its samples.
  SimulatedDevice(ModelShape model, std::vector<SimulatedGraph> graphs, uint32_t num_blocks, double step_ns,
                  double token_ns);

  const ModelShape& model() const override { return model_; }
  uint32_t num_blocks() const override { return num_blocks_; }
  Status Enqueue(const StepBatch& batch, Fence* fence) override;
  Status Wait(Fence fence, const float** logits) override;
  Status CopyBlock(uint32_t, uint32_t) override { return Status::Ok(); }

  double now_ns() const { return now_ns_; }
  void AdvanceTo(double ns) { now_ns_ = ns > now_ns_ ? ns : now_ns_; }
  double busy_ns() const { return busy_ns_; }
  // By graph, sequences and length.
  std::vector<SimulatedLoad> Loads() const;

 private:
  ModelShape model_;
  std::vector<SimulatedGraph> graphs_;
  uint32_t num_blocks_;
  double step_ns_, token_ns_, now_ns_ = 0, busy_ns_ = 0;
  std::vector<float> logits_;  // zeros
  std::unordered_map<uint64_t, SimulatedLoad> loads_;
};

}  // namespace llmc
