#include "device/gpu/offload.h"

#include <algorithm>
#include <set>

#include "device/gpu/device_memory.h"
#include "device/gpu/launch.h"

namespace llmc {
namespace {

constexpr uint64_t kRingShare = 4;  // the ring has at most this part of what is offloaded

enum Group : uint8_t { kInPlace, kStreamed, kLast };

bool IsVector(const WeightRecord& weight) {
  return std::count_if(weight.shape, weight.shape + 4, [](int64_t size) { return size > 1; }) <= 1;
}

// Calls visit(graph) for graphs with different commands.
template <class Visit>
void EachGraph(const Artifact& artifact, Visit visit) {
  std::set<uint32_t> seen;
  for (const GraphRecord& graph : artifact.graphs()) {
    if (seen.insert(graph.first_command).second) visit(graph);
  }
}

Group GroupOf(const Artifact& artifact, const CommandRecord& command) {
  constexpr uint32_t kEmbedding = 0, kLinear = 2;  // FORMAT.md, families
  if (command.family == kEmbedding) return kInPlace;
  if (command.family != kLinear) return kLast;
  return ReadsWholeWeights(artifact.kernels()[command.kernel]) ? kStreamed : kInPlace;
}

// The group of each weight, as operands name it: the last one of those that its readers say.
std::vector<Group> GroupsOf(const Artifact& artifact, size_t num_weights) {
  std::vector<Group> groups(num_weights, kInPlace);
  EachGraph(artifact, [&](const GraphRecord& graph) {
    for (uint32_t c = graph.first_command; c < graph.first_command + graph.num_commands; ++c) {
      const CommandRecord& command = artifact.commands()[c];
      if (artifact.collective(command) != nullptr) continue;
      const Group group = GroupOf(artifact, command);
      for (uint32_t o = command.first_operand; o < command.first_operand + command.num_operands; ++o) {
        const OperandRecord& operand = artifact.operands()[o];
        if (static_cast<OperandKind>(operand.kind) != OperandKind::kWeight) continue;
        groups[operand.index] = std::max(groups[operand.index], group);
      }
    }
  });
  return groups;
}

// Weights that may be offloaded, the first ones first.
std::vector<const WeightRecord*> OrderOf(const Artifact& artifact, const std::vector<const WeightRecord*>& named,
                                         uint64_t bytes) {
  const std::vector<Group> groups = GroupsOf(artifact, named.size());
  std::vector<std::pair<Group, const WeightRecord*>> all;
  for (size_t i = 0; i < named.size(); ++i) {
    if (named[i] == nullptr || IsVector(*named[i])) continue;
    const bool large = groups[i] == kStreamed && named[i]->bytes > bytes / (2 * kRingShare);
    all.emplace_back(large ? kLast : groups[i], named[i]);
  }
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first < b.first : a.second->file_offset > b.second->file_offset;
  });
  std::vector<const WeightRecord*> order;
  order.reserve(all.size());
  for (const auto& [group, weight] : all) order.push_back(weight);
  return order;
}

FileRuns RunsOf(std::vector<const WeightRecord*> weights) {
  std::sort(weights.begin(), weights.end(),
            [](const WeightRecord* a, const WeightRecord* b) { return a->file_offset < b->file_offset; });
  return FileRuns(weights.data(), weights.size());
}

}  // namespace

bool Offload::Take(const std::vector<const WeightRecord*>& order, uint64_t bytes) {
  std::set<const WeightRecord*> taken;
  bytes_ = 0;
  for (size_t i = 0; i < order.size() && bytes_ < bytes; ++i) {
    taken.insert(order[i]);
    bytes_ += order[i]->bytes;
  }
  std::vector<const WeightRecord*> stay;
  for (const WeightRecord* weight : named_) {
    if (weight != nullptr && taken.count(weight) == 0) stay.push_back(weight);
  }
  stay_ = RunsOf(std::move(stay));
  leave_ = RunsOf({taken.begin(), taken.end()});
  host_weights_.assign(named_.size(), {});
  for (size_t i = 0; i < named_.size(); ++i) {
    if (taken.count(named_[i]) != 0) host_weights_[i] = {leave_.At(*named_[i]), named_[i]->bytes};
  }
  return bytes_ >= bytes;
}

uint64_t Offload::FittingRing(const Artifact& artifact, uint32_t stage) const {
  uint64_t bytes = 0;
  EachGraph(artifact, [&](const GraphRecord& graph) {
    const std::vector<RingUse> uses = RingUsesOf(artifact, graph, stage, host_weights_);
    bytes = std::max(bytes, RingBytes(uses, host_weights_, bytes_ / kRingShare));
  });
  return bytes;
}

// What the ring takes is made up for by more weights, which may need a larger ring.
Offload Offload::Of(const Artifact& artifact, uint32_t rank, const OffloadOptions& options) {
  Offload of(WeightsOfRank(artifact, rank));
  const std::vector<const WeightRecord*> order = OrderOf(artifact, of.named_, options.bytes);
  bool more = of.Take(order, options.bytes);
  const bool fitting = options.ring_bytes == OffloadOptions::kFitting;
  while (of.bytes_ > 0) {
    of.ring_bytes_ = fitting ? of.FittingRing(artifact, artifact.stage_of(rank)) : options.ring_bytes;
    if (!more || of.bytes_ >= options.bytes + of.ring_bytes_) break;
    more = of.Take(order, options.bytes + of.ring_bytes_);
  }
  return of;
}

}  // namespace llmc
