#include "device/ranks/overlap_rule.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/clock.h"

namespace llmc {
namespace {

// Below, a part has too few rows for the tiles of kernels.
constexpr uint32_t kLeastRows = 64;
// What is gained must be so many times what is lost: both are measured once, and sums take time of the CPU as well.
constexpr double kMargin = 2;
constexpr uint64_t kFewFloats = 1024, kManyFloats = 128 * 1024;
constexpr int kTimedSums = 3;

}  // namespace

uint32_t LeastOverlapRows(const OverlapCosts& costs, uint32_t most_rows) {
  const double rows = std::ceil(2 * kMargin * costs.pass_ns / costs.row_ns);
  if (!(rows <= static_cast<double>(most_rows))) return 0;  // also if nothing takes time
  const uint32_t least = std::max(kLeastRows, static_cast<uint32_t>(rows));
  return least <= most_rows ? least : 0;
}

uint64_t SummedBytesOfRow(const Artifact& artifact) {
  const std::vector<GraphRecord>& graphs = artifact.graphs();
  const auto graph = std::max_element(graphs.begin(), graphs.end(), [](const GraphRecord& a, const GraphRecord& b) {
    return a.max_tokens < b.max_tokens;
  });
  uint64_t floats = 0;
  for (uint32_t c = 0; c < graph->num_commands; ++c) {
    const CollectiveRecord* record = artifact.collective(artifact.commands()[graph->first_command + c]);
    if (record != nullptr && record->op == static_cast<uint32_t>(CollectiveOp::kAllReduce)) floats += record->width;
  }
  return floats * sizeof(float);
}

double TimeOfSummedByte(Collective* collective) {
  std::vector<float> data(kManyFloats);
  const auto least_ns = [&](uint64_t count) {
    uint64_t least = UINT64_MAX;
    for (int i = 0; i < kTimedSums; ++i) {
      const uint64_t start = MonotonicNs();
      collective->AllReduce({data.data(), data.data(), nullptr, nullptr, 1, count}, 0, 1);
      least = std::min(least, MonotonicNs() - start);
    }
    return static_cast<double>(least);
  };
  const double few = least_ns(kFewFloats), many = least_ns(kManyFloats);
  return std::max(0.0, many - few) / static_cast<double>((kManyFloats - kFewFloats) * sizeof(float));
}

}  // namespace llmc
