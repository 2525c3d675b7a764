#include "device/gpu/launch.h"

#include <algorithm>

namespace llmc {
namespace {

constexpr uint32_t kMostItems = 1024;
constexpr uint64_t kMostGroups = 1 << 16;  // the limit that kernels are compiled with (FORMAT.md)

}  // namespace

uint64_t GpuLaunch::GroupsIn(const GraphRecord& graph) const {
  const uint64_t most = rows == 0 ? 1 : rows == 1 ? graph.max_tokens : graph.max_samples;
  const uint64_t tiles = (most + tile_rows - 1) / tile_rows;
  return std::clamp<uint64_t>(tiles * groups, 1, kMostGroups);
}

bool ReadsWholeWeights(const KernelRecord& kernel) { return kernel.launch[4] == 0 && kernel.launch[5] == 1; }

Status UnsupportedArtifact(const Artifact& artifact, const std::string& what) {
  return Status::Error(LLMC_ERR_UNSUPPORTED_TARGET, "the artifact '" + artifact.directory() + "' " + what);
}

Status CheckGpuTarget(const Artifact& artifact, const std::string& kind, uint32_t max_level) {
  const TargetFacts& target = artifact.target();
  if (target.kind != kind) {
    return UnsupportedArtifact(artifact, "is for devices of kind '" + target.kind + "' (target " + target.name +
                                             ") and this one is of kind '" + kind +
                                             "'; open one of that kind, or compile it for this");
  }
  if (target.level > max_level) {
    return UnsupportedArtifact(artifact, "needs level " + std::to_string(target.level) +
                                             " and this runtime knows levels up to " + std::to_string(max_level) +
                                             "; use a newer llmc");
  }
  return Status::Ok();
}

Status ReadLaunch(const Artifact& artifact, const KernelRecord& kernel, uint64_t group_items, GpuLaunch* out) {
  *out = {kernel.launch[0], kernel.launch[1], kernel.launch[2], kernel.launch[3]};
  if (out->items == 0 || out->items > kMostItems || out->rows > 2 || out->groups == 0 || out->tile_rows == 0) {
    return artifact.Corrupt("graphs.bin",
                            std::string("kernel '") + artifact.symbol(kernel) + "' has launch facts of no kernel");
  }
  if (out->items > group_items) {
    return UnsupportedArtifact(artifact, "has groups of " + std::to_string(out->items) +
                                             " work items and this device at most " + std::to_string(group_items) +
                                             "; choose another device");
  }
  return Status::Ok();
}

}  // namespace llmc
