#include "device/gpu/offload.h"

#include <algorithm>
#include <set>

#include "device/gpu/device_memory.h"

namespace llmc {
namespace {

constexpr uint64_t kRingShare = 4;  // the ring has at most this part of what is offloaded

bool IsVector(const WeightRecord& weight) {
  return std::count_if(weight.shape, weight.shape + 4, [](int64_t size) { return size > 1; }) <= 1;
}

}  // namespace

bool Offload::Take(const std::vector<const WeightRecord*>& named, uint64_t bytes) {
  std::vector<const WeightRecord*> ordered;
  for (const WeightRecord* weight : named) {
    if (weight != nullptr) ordered.push_back(weight);
  }
  std::sort(ordered.begin(), ordered.end(),
            [](const WeightRecord* a, const WeightRecord* b) { return a->file_offset < b->file_offset; });
  std::vector<const WeightRecord*> stay, leave;
  bytes_ = 0;
  for (size_t i = ordered.size(); i-- > 0;) {
    const bool leaves = bytes_ < bytes && !IsVector(*ordered[i]);
    if (leaves) bytes_ += ordered[i]->bytes;
    (leaves ? leave : stay).push_back(ordered[i]);
  }
  std::reverse(stay.begin(), stay.end());
  std::reverse(leave.begin(), leave.end());
  stay_ = FileRuns(stay.data(), stay.size());
  leave_ = FileRuns(leave.data(), leave.size());
  host_weights_.assign(named.size(), {});
  for (size_t i = 0; i < named.size(); ++i) {
    if (named[i] != nullptr && !stay_.Holds(*named[i])) host_weights_[i] = {leave_.At(*named[i]), named[i]->bytes};
  }
  return bytes_ >= bytes;
}

uint64_t Offload::FittingRing(const Artifact& artifact, uint32_t stage) const {
  uint64_t bytes = 0;
  std::set<uint32_t> seen;  // graphs may share their commands
  for (const GraphRecord& graph : artifact.graphs()) {
    if (!seen.insert(graph.first_command).second) continue;
    const std::vector<RingUse> uses = RingUsesOf(artifact, graph, stage, host_weights_);
    bytes = std::max(bytes, RingBytes(uses, host_weights_, bytes_ / kRingShare));
  }
  return bytes;
}

// What the ring takes is made up for by more weights, which may need a larger ring.
Offload Offload::Of(const Artifact& artifact, uint32_t rank, const OffloadOptions& options) {
  const std::vector<const WeightRecord*> named = WeightsOfRank(artifact, rank);
  Offload of;
  bool left = of.Take(named, options.bytes);
  const bool fitting = options.ring_bytes == OffloadOptions::kFitting;
  while (of.bytes_ > 0) {
    of.ring_bytes_ = fitting ? of.FittingRing(artifact, artifact.stage_of(rank)) : options.ring_bytes;
    if (!left || of.bytes_ >= options.bytes + of.ring_bytes_) break;
    left = of.Take(named, options.bytes + of.ring_bytes_);
  }
  return of;
}

}  // namespace llmc
