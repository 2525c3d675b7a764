// GraphLadder: the graphs of a model that steps may use, and which of them hold a load.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "artifact/model_shape.h"

namespace llmc {

// Load of a step. blocks: of the sequence with most blocks. all_blocks: sum over all sequences.
struct StepLoad {
  uint32_t seqs = 0, tokens = 0, samples = 0, blocks = 0, all_blocks = 0;
};

// Bit i: graphs of phase i are allowed.
using PhaseSet = uint32_t;
constexpr PhaseSet SetOf(Phase phase) { return 1u << static_cast<uint32_t>(phase); }
constexpr PhaseSet kMixedPhase = SetOf(Phase::kMixed);
constexpr PhaseSet kPrefillPhases = SetOf(Phase::kPrefill) | kMixedPhase;
constexpr PhaseSet kDecodePhases = SetOf(Phase::kDecode) | kMixedPhase;
constexpr PhaseSet kAnyPhase = kPrefillPhases | kDecodePhases;

constexpr int kNoGraph = -1;

class GraphLadder {
 public:
  // All graphs are on.
  explicit GraphLadder(const ModelShape& model);

  void Enable(uint32_t graph, bool on) { enabled_[graph] = on; }
  bool Enabled(uint32_t graph) const { return enabled_[graph]; }
  // Call after the model got more graphs; the new ones are off.
  void TakeNewGraphs();

  // Over all graphs, including those that are off: whether one is mixed, and the most tokens of a graph that takes
  // prefills.
  bool has_mixed() const { return has_mixed_; }
  uint32_t largest_step() const { return largest_step_; }

  // The smallest graph that holds the load, ordered by max_tokens, then blocks per sequence, then max_seqs; kNoGraph if
  // none.
  int Choose(const StepLoad& load, PhaseSet phases) const;
  // Most tokens, up to `most`, of one more sequence that some graph holds together with `load`. They follow the
  // sequence's `computed` tokens. remaining: all its tokens left; only the last one is sampled.
  uint32_t Room(const StepLoad& load, uint32_t computed, uint32_t remaining, uint32_t most, PhaseSet phases) const;
  // The same for a sequence that is scored and runs alone. Every row after num_scored tokens is sampled, so graphs of
  // all phases can serve it: the results of kernels do not depend on the phase.
  uint32_t ScoringRoom(uint32_t computed, uint32_t num_scored, uint32_t most) const;
  // Most extra rows that some graph holds beside a load, if each is sampled and possibly in its own block.
  uint32_t Spare(const StepLoad& load, PhaseSet phases) const;
  // Longest context of a sequence that some graph can read.
  uint64_t LongestReach(PhaseSet phases) const;

 private:
  bool Usable(std::size_t graph, PhaseSet phases) const {
    return enabled_[graph] && (phases & SetOf(model_.graphs[graph].phase)) != 0;
  }
  // Longest context of a sequence that a graph can read, beside other sequences with `others` blocks.
  uint64_t Reach(const GraphShape& g, uint32_t others = 0) const {
    const uint32_t left = g.max_blocks == 0 ? g.max_blocks_per_seq : g.max_blocks - std::min(g.max_blocks, others);
    return uint64_t{std::min(left, g.max_blocks_per_seq)} * static_cast<uint32_t>(model_.block_size);
  }

  const ModelShape& model_;
  std::vector<bool> enabled_;  // [graph]
  bool has_mixed_ = false;
  uint32_t largest_step_ = 1;
};

}  // namespace llmc
