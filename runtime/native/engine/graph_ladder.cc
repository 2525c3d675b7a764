#include "engine/graph_ladder.h"

#include <algorithm>

namespace llmc {
namespace {

bool Holds(const GraphShape& g, const StepLoad& load) {
  return load.seqs <= g.max_seqs && load.tokens <= g.max_tokens && load.samples <= g.max_samples &&
         load.blocks <= g.max_blocks_per_seq && (g.max_blocks == 0 || load.all_blocks <= g.max_blocks);
}

// Orders graphs by rows computed, then by blocks of the block table per sequence, compared without dividing.
bool Smaller(const GraphShape& a, const GraphShape& b) {
  if (a.max_tokens != b.max_tokens) return a.max_tokens < b.max_tokens;
  const uint64_t blocks_a = a.table_blocks() * b.max_seqs, blocks_b = b.table_blocks() * a.max_seqs;
  return blocks_a != blocks_b ? blocks_a < blocks_b : a.max_seqs < b.max_seqs;
}

}  // namespace

GraphLadder::GraphLadder(const ModelShape& model) : model_(model) {
  TakeNewGraphs();
  enabled_.assign(model.graphs.size(), true);
}

void GraphLadder::TakeNewGraphs() {
  enabled_.resize(model_.graphs.size(), false);
  for (const GraphShape& g : model_.graphs) {
    if (g.phase == Phase::kDecode) continue;
    has_mixed_ |= g.phase == Phase::kMixed;
    largest_step_ = std::max(largest_step_, g.max_tokens);
  }
}

int GraphLadder::Choose(const StepLoad& load, PhaseSet phases) const {
  int best = kNoGraph;
  for (std::size_t i = 0; i < enabled_.size(); ++i) {
    const GraphShape& g = model_.graphs[i];
    if (!Usable(i, phases) || !Holds(g, load)) continue;
    if (best == kNoGraph || Smaller(g, model_.graphs[static_cast<std::size_t>(best)])) best = static_cast<int>(i);
  }
  return best;
}

uint32_t GraphLadder::Room(const StepLoad& load, uint32_t computed, uint32_t remaining, uint32_t most,
                           PhaseSet phases) const {
  const StepLoad with_one = {load.seqs + 1, load.tokens + 1, load.samples, load.blocks, load.all_blocks};
  uint32_t best = 0;
  for (std::size_t i = 0; i < enabled_.size(); ++i) {
    const GraphShape& g = model_.graphs[i];
    const uint64_t reach = Reach(g, load.all_blocks);
    if (!Usable(i, phases) || !Holds(g, with_one) || reach <= computed) continue;
    uint32_t room = static_cast<uint32_t>(std::min<uint64_t>({most, g.max_tokens - load.tokens, reach - computed}));
    if (g.phase == Phase::kDecode) room = std::min(room, 1u);
    if (room == remaining && load.samples >= g.max_samples) room = remaining - 1;
    best = std::max(best, room);
  }
  return best;
}

uint32_t GraphLadder::ScoringRoom(uint32_t computed, uint32_t num_scored, uint32_t most) const {
  const uint64_t again = num_scored - computed;  // recomputed after a preemption
  uint32_t best = 0;
  for (std::size_t i = 0; i < enabled_.size(); ++i) {
    const GraphShape& g = model_.graphs[i];
    if (!enabled_[i] || Reach(g) <= computed) continue;
    const uint64_t room = std::min<uint64_t>({most, g.max_tokens, again + g.max_samples, Reach(g) - computed});
    best = std::max(best, static_cast<uint32_t>(room));
  }
  return best;
}

uint32_t GraphLadder::Spare(const StepLoad& load, PhaseSet phases) const {
  uint32_t most = 0;
  for (std::size_t i = 0; i < enabled_.size(); ++i) {
    const GraphShape& g = model_.graphs[i];
    if (!Usable(i, phases) || !Holds(g, load)) continue;
    const uint32_t blocks = g.max_blocks == 0 ? UINT32_MAX : g.max_blocks - load.all_blocks;
    most = std::max(most, std::min({g.max_tokens - load.tokens, g.max_samples - load.samples, blocks}));
  }
  return most;
}

uint64_t GraphLadder::LongestReach(PhaseSet phases) const {
  uint64_t most = 0;
  for (std::size_t i = 0; i < enabled_.size(); ++i) {
    if (Usable(i, phases)) most = std::max(most, Reach(model_.graphs[i]));
  }
  return most;
}

}  // namespace llmc
