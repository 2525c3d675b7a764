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

uint64_t Artifact::rank_weight_bytes() const {
  if (num_ranks() <= 1) return weight_file().size();
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < num_named_weights(); ++i) bytes += weights_[weight_of(i, 0)].bytes;
  return bytes;
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
  if (ranks == 0) {
    return collectives_.empty() ? Status::Ok() : Corrupt("graphs.bin", "it has collectives of one rank");
  }
  const uint64_t first = uint64_t(shared), own = (count - first) / uint64_t(ranks);
  if (first + own * uint64_t(ranks) != count) {
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
    if (!reduces && !gathers) return Corrupt("graphs.bin", name + " has unknown op " + Str(c.op));
    if (c.rows > static_cast<uint32_t>(CollectiveRows::kSamples)) {
      return Corrupt("graphs.bin", name + " has unknown rows " + Str(c.rows));
    }
    if (c.width < 1 || c.width > kMaxWidth || (gathers && c.width % uint32_t(ranks) != 0)) {
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
  bool sound = lies(*operand++, OperandKind::kArena, gathers ? whole / num_ranks() : whole);
  if (collective.adds & kAddsBias) sound = lies(*operand++, OperandKind::kWeight, row) && sound;
  if (collective.adds & kAddsResidual) sound = lies(*operand++, OperandKind::kArena, whole) && sound;
  sound = (lies(*operand, OperandKind::kArena, whole) || lies(*operand, OperandKind::kOutput, whole)) && sound;
  return sound ? Status::Ok() : Corrupt("graphs.bin", name + " of a collective has operands of other kinds or sizes");
}

}  // namespace llmc
