#include "device/gpu/weight_ring.h"

#include <algorithm>

#include "device/gpu/launch.h"

namespace llmc {
namespace {

using Weights = std::vector<HostWeight>;

// Weights keep their distances where they are neighbours on the host, and are one copy then.
void Place(const RingUse& use, const Weights& weights, RingLoad* load) {
  for (const uint32_t weight : use.weights) {
    const HostWeight& host = weights[weight];
    const uint64_t to = RoundUp(load->bytes, kAlignment);
    load->weights.push_back({weight, to});
    load->bytes = to + host.bytes;
    if (!load->copies.empty()) {
      RingLoad::Copy& before = load->copies.back();
      if (host.at - before.from == to - before.to) {
        before.bytes = load->bytes - before.to;
        continue;
      }
    }
    load->copies.push_back({host.at, to, host.bytes});
  }
  load->bytes = RoundUp(load->bytes, kAlignment);
}

bool Has(const RingLoad& load, const RingUse& use) {
  const auto loaded = [&](uint32_t weight) {
    return std::any_of(load.weights.begin(), load.weights.end(), [&](const auto& one) { return one.weight == weight; });
  };
  return std::all_of(use.weights.begin(), use.weights.end(), loaded);
}

// Loads that begin at 0, of at most that many bytes. A weight that commands apart from each other read is loaded twice:
// held in between, it would take the room of others.
std::vector<RingLoad> LoadsOf(const std::vector<RingUse>& uses, const Weights& weights, uint64_t most) {
  std::vector<RingLoad> loads;
  for (const RingUse& use : uses) {
    if (!loads.empty() && Has(loads.back(), use)) {
      loads.back().last = use.command;
      continue;
    }
    RingLoad load;
    load.first = load.last = use.command;
    Place(use, weights, &load);
    if (load.bytes <= most) loads.push_back(std::move(load));
  }
  return loads;
}

// The last command that reads what bytes [at, at + bytes) hold. Later loads are read later, so the first one found is it.
uint32_t LastReader(const std::vector<RingLoad>& loads, size_t count, uint64_t at, uint64_t bytes) {
  for (size_t i = count; i-- > 0;) {
    if (loads[i].at < at + bytes && at < loads[i].at + loads[i].bytes) return loads[i].last;
  }
  return RingLoad::kNone;
}

// Whether a load that begins at `at` leaves room for the next one beside it.
bool LeavesRoom(const RingLoad& load, uint64_t at, uint64_t next, uint64_t ring_bytes) {
  return std::max(at, ring_bytes - at - load.bytes) >= next;
}

// Takes the place whose bytes have been read longest ago, beside one of the loads before or at an end of the ring.
void FindPlace(std::vector<RingLoad>* loads, size_t index, uint64_t ring_bytes) {
  RingLoad& load = (*loads)[index];
  const uint64_t next = index + 1 < loads->size() ? (*loads)[index + 1].bytes : 0;
  const auto age = [](uint32_t after) { return after == RingLoad::kNone ? int64_t{-1} : int64_t{after}; };
  bool found = false, leaves_room = false;
  const auto consider = [&](uint64_t at) {
    if (at > ring_bytes - load.bytes) return;
    const uint32_t after = LastReader(*loads, index, at, load.bytes);
    const bool leaves = LeavesRoom(load, at, next, ring_bytes);
    const bool better = !found || (leaves && !leaves_room) || (leaves == leaves_room && age(after) < age(load.after));
    if (!better) return;
    found = true;
    leaves_room = leaves;
    load.at = at;
    load.after = after;
  };
  consider(0);
  for (size_t i = index; i-- > 0;) {
    const RingLoad& before = (*loads)[i];
    consider(before.at + before.bytes);
    if (before.at >= load.bytes) consider(before.at - load.bytes);
    // Older ones than that are read long ago.
    if (index - i == 8) break;
  }
  consider(ring_bytes - load.bytes);
}

}  // namespace

std::vector<RingUse> RingUsesOf(const Artifact& artifact, const GraphRecord& graph, uint32_t stage,
                                const Weights& weights) {
  std::vector<RingUse> uses;
  StageWalk walk(artifact, graph);
  for (uint32_t c = 0; c < graph.num_commands; ++c) {
    const CommandRecord& command = artifact.commands()[graph.first_command + c];
    if (!walk.Runs(command, stage) || artifact.collective(command) != nullptr) continue;
    if (!ReadsWholeWeights(artifact.kernels()[command.kernel])) continue;
    RingUse use;
    use.command = c;
    for (uint32_t o = 0; o < command.num_operands; ++o) {
      const OperandRecord& operand = artifact.operands()[command.first_operand + o];
      if (static_cast<OperandKind>(operand.kind) != OperandKind::kWeight || weights[operand.index].bytes == 0) continue;
      use.weights.push_back(operand.index);
    }
    if (use.weights.empty()) continue;
    std::sort(use.weights.begin(), use.weights.end(),
              [&](uint32_t a, uint32_t b) { return weights[a].at < weights[b].at; });
    use.weights.erase(std::unique(use.weights.begin(), use.weights.end()), use.weights.end());
    uses.push_back(std::move(use));
  }
  return uses;
}

uint64_t RingBytes(const std::vector<RingUse>& uses, const Weights& weights, uint64_t limit) {
  uint64_t most = 0, before = 0;
  for (const RingLoad& load : LoadsOf(uses, weights, limit / 2)) {
    most = std::max(most, before + load.bytes);
    before = load.bytes;
  }
  return most;
}

std::vector<RingLoad> PlanRing(const std::vector<RingUse>& uses, const Weights& weights, uint64_t ring_bytes) {
  std::vector<RingLoad> loads = LoadsOf(uses, weights, ring_bytes);
  for (size_t i = 0; i < loads.size(); ++i) {
    FindPlace(&loads, i, ring_bytes);
    for (RingLoad::Placed& one : loads[i].weights) one.at += loads[i].at;
    for (RingLoad::Copy& copy : loads[i].copies) copy.to += loads[i].at;
  }
  return loads;
}

}  // namespace llmc
