// Checks the tables of ranks, their weights and their collectives.
#include <algorithm>
#include <cstddef>
#include <string>

#include "artifact/artifact.h"
#include "artifact/check_text.h"

namespace llmc {
namespace {

constexpr uint32_t kMaxWidth = 1u << 28;

bool Alike(const WeightRecord& a, const WeightRecord& b) {
  return a.dtype == b.dtype && a.rank == b.rank && a.bytes == b.bytes && std::equal(a.shape, a.shape + 4, b.shape) &&
         a.layout_length == b.layout_length;
}

}  // namespace

std::vector<bool> Artifact::WeightsOf(uint32_t stage) const {
  std::vector<bool> read(num_named_weights(), stages_.empty());
  if (stages_.empty()) return read;
  for (const GraphRecord& graph : graphs_) {
    StageWalk walk(*this, graph);
    for (uint32_t c = 0; c < graph.num_commands; ++c) {
      const CommandRecord& command = commands_[graph.first_command + c];
      if (!walk.Runs(command, stage)) continue;
      for (uint32_t o = 0; o < command.num_operands; ++o) {
        const OperandRecord& operand = operands_[command.first_operand + o];
        if (operand.kind == static_cast<uint32_t>(OperandKind::kWeight)) read[operand.index] = true;
      }
    }
  }
  return read;
}

uint64_t Artifact::rank_weight_bytes() const {
  if (num_ranks() == 1) return weight_file().size();
  uint64_t most = 0;
  for (uint32_t stage = 0; stage < num_stages(); ++stage) {
    const std::vector<bool> read = WeightsOf(stage);
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < read.size(); ++i) bytes += read[i] ? weights_[weight_of(i, 0)].bytes : 0;
    most = std::max(most, bytes);
  }
  return most;
}

uint64_t Artifact::passed_bytes() const {
  uint64_t most = 0;
  for (const GraphRecord& graph : graphs_) {
    StageWalk walk(*this, graph);
    for (uint32_t c = 0; c < graph.num_commands; ++c) {
      walk.Runs(commands_[graph.first_command + c], 0);
      most = std::max(most, walk.passed_end());
    }
  }
  return most;
}

// Call after CheckModel. Each stage has some of the KV cache's layers, one stage after the other.
Status Artifact::CheckStages() const {
  if (stages_.empty()) return Status::Ok();
  const uint64_t ranks = uint64_t{stages_.size()} * (model_.num_ranks > 1 ? uint64_t(model_.num_ranks) : 1);
  if (stages_.size() < 2 || ranks > uint64_t{kMaxRanks}) {
    return Corrupt("graphs.bin", "it has " + Str(uint64_t{stages_.size()}) + " stages of " + Str(model_.num_ranks) +
                                     " ranks, which are 2 or more, of at most " + Str(kMaxRanks) + " ranks");
  }
  uint64_t next = 0;
  for (std::size_t i = 0; i < stages_.size(); ++i) {
    const StageRecord& stage = stages_[i];
    if (stage.first_layer != next || stage.num_layers < 1) {
      return Corrupt("graphs.bin", "stage " + Str(uint64_t{i}) + " has " + Str(stage.num_layers) + " layers from " +
                                       Str(stage.first_layer) + " on, and the ones before end at " + Str(next));
    }
    next += stage.num_layers;
  }
  if (next != uint64_t(model_.num_layers)) {
    return Corrupt("graphs.bin", "its stages have " + Str(next) + " layers of " + Str(model_.num_layers));
  }
  return Status::Ok();
}

Status Artifact::CheckRanks() const {
  const int32_t ranks = model_.num_ranks, shared = model_.num_shared_weights;
  const uint64_t count = weights_.size();
  if (ranks != 0 && (ranks < 2 || ranks > kMaxRanks)) {
    return Corrupt("graphs.bin", "the model's num_ranks is " + Str(ranks) + ", outside 2 … " + Str(kMaxRanks));
  }
  if (shared < 0 || uint64_t(shared) > count || (ranks == 0 && shared != 0)) {
    return Corrupt("graphs.bin", "the model's num_shared_weights is " + Str(shared) + " of " + Str(count));
  }
  if (ranks == 0 && stages_.empty()) {
    return collectives_.empty() ? Status::Ok() : Corrupt("graphs.bin", "it has collectives of one rank");
  }
  const uint64_t first = uint64_t(shared), own = (count - first) / ranks_of_stage();
  if (first + own * ranks_of_stage() != count) {
    return Corrupt("graphs.bin", Str(count - first) + " weights are not as many for each of " + Str(ranks) + " ranks");
  }
  for (uint64_t i = first + own; i < count; ++i) {
    const WeightRecord& of_first = weights_[first + (i - first) % own];
    if (!Alike(weights_[i], of_first) ||
        strings_.compare(weights_[i].layout_offset, weights_[i].layout_length, strings_, of_first.layout_offset,
                         of_first.layout_length) != 0) {
      return Corrupt("graphs.bin", WeightName(weights_[i]) + " is not like that of rank 0");
    }
  }
  for (std::size_t i = 0; i < collectives_.size(); ++i) {
    const CollectiveRecord& c = collectives_[i];
    const bool reduces = c.op == static_cast<uint32_t>(CollectiveOp::kAllReduce);
    const bool gathers = c.op == static_cast<uint32_t>(CollectiveOp::kAllGather);
    const std::string name = "collective " + Str(uint64_t{i});
    const bool passes = c.op == static_cast<uint32_t>(CollectiveOp::kPassOn) && !stages_.empty();
    if (!passes && (ranks == 0 || (!reduces && !gathers))) {
      return Corrupt("graphs.bin", name + " has unknown op " + Str(c.op));
    }
    if (passes && c.stage >= stages_.size()) {
      return Corrupt("graphs.bin", name + " is of stage " + Str(c.stage) + " of " + Str(uint64_t{stages_.size()}));
    }
    if (c.rows > static_cast<uint32_t>(CollectiveRows::kSamples)) {
      return Corrupt("graphs.bin", name + " has unknown rows " + Str(c.rows));
    }
    if (c.width < 1 || c.width > kMaxWidth || (gathers && c.width % ranks_of_stage() != 0)) {
      return Corrupt("graphs.bin", name + " has rows of " + Str(c.width) + " for " + Str(ranks) + " ranks");
    }
    if ((c.adds & ~(reduces ? kAddsBias | kAddsResidual : 0u)) != 0) {
      return Corrupt("graphs.bin", name + " adds " + Str(c.adds) + ", which it cannot");
    }
  }
  return Status::Ok();
}

// Call after the command's operands are checked: they are within their buffers.
Status Artifact::CheckCollective(const GraphRecord& graph, uint32_t index, const CollectiveRecord& collective) const {
  const CommandRecord& command = commands_[index];
  const std::string name = "command " + Str(index);
  // Other threads may read or write the rows only after all threads of the rank have finished theirs.
  if (command.barrier != 1) return Corrupt("graphs.bin", name + " of a collective has no barrier");
  const bool tokens = collective.rows == static_cast<uint32_t>(CollectiveRows::kTokens);
  const bool gathers = collective.op == static_cast<uint32_t>(CollectiveOp::kAllGather);
  const uint64_t row = uint64_t{collective.width} * sizeof(float);
  const uint64_t whole = (tokens ? graph.max_tokens : graph.max_samples) * row;
  const OperandRecord* operand = &operands_[command.first_operand];
  const auto lies = [&](const OperandRecord& o, OperandKind kind, uint64_t bytes) {
    return o.kind == static_cast<uint32_t>(kind) && o.bytes >= bytes;
  };
  bool sound = true;
  if (collective.op != static_cast<uint32_t>(CollectiveOp::kPassOn)) {
    sound = lies(*operand++, OperandKind::kArena, gathers ? whole / ranks_of_stage() : whole);
  }
  if (collective.adds & kAddsBias) sound = lies(*operand++, OperandKind::kWeight, row) && sound;
  if (collective.adds & kAddsResidual) sound = lies(*operand++, OperandKind::kArena, whole) && sound;
  sound = (lies(*operand, OperandKind::kArena, whole) || lies(*operand, OperandKind::kOutput, whole)) && sound;
  return sound ? Status::Ok() : Corrupt("graphs.bin", name + " of a collective has operands of other kinds or sizes");
}

// A graph visits the stages in their order and hands its results to the first one. Call after its commands are checked.
Status Artifact::CheckOrderOfStages(const GraphRecord& graph, const std::string& name) const {
  StageWalk walk(*this, graph);
  uint32_t left = 0;  // stages that have handed on something
  bool passing = false;  // the command before did
  for (uint32_t c = 0; c < graph.num_commands; ++c) {
    const CommandRecord& command = commands_[graph.first_command + c];
    const CollectiveRecord* collective = this->collective(command);
    const bool passes = collective != nullptr && collective->op == static_cast<uint32_t>(CollectiveOp::kPassOn);
    if (passes && !(passing && collective->stage + 1 == left) && collective->stage != left) {
      return Corrupt("graphs.bin",
                     name + " passes on results of stage " + Str(collective->stage) + " in stage " + Str(left));
    }
    if (!passes && left == num_stages()) return Corrupt("graphs.bin", name + " goes on behind its last stage");
    if (passes) left = collective->stage + 1;
    passing = passes;
    walk.Runs(command, 0);
    if (passes) continue;
    const StageRecord layers = layers_of(walk.at());
    for (uint32_t o = 0; o < command.num_operands; ++o) {
      const OperandRecord& operand = operands_[command.first_operand + o];
      const auto kind = static_cast<OperandKind>(operand.kind);
      if (kind != OperandKind::kKeyPool && kind != OperandKind::kValuePool) continue;
      if (operand.index - layers.first_layer >= layers.num_layers) {
        return Corrupt("graphs.bin", name + " reads layer " + Str(operand.index) + " in stage " + Str(walk.at()) +
                                         ", which has others");
      }
    }
  }
  return left == num_stages() ? Status::Ok() : Corrupt("graphs.bin", name + " ends in stage " + Str(left));
}

}  // namespace llmc
