// What devices whose kernels are launched read of an artifact alike: whom it is for, and how a kernel is launched.
#pragma once
#include <cstdint>
#include <string>

#include "artifact/artifact.h"
#include "core/status.h"

namespace llmc {

// Launch facts of a kernel (FORMAT.md, devices of kind opencl).
struct GpuLaunch {
  uint32_t items, rows, groups, tile_rows;

  // Groups for all rows that the graph holds.
  uint64_t GroupsIn(const GraphRecord& graph) const;
};

Status UnsupportedArtifact(const Artifact& artifact, const std::string& what);
// Whether the artifact is for devices of `kind` at a level up to max_level, and has nothing that they do not take.
Status CheckGpuTarget(const Artifact& artifact, const std::string& kind, uint32_t max_level);
// group_items: the most that a group of the device has.
Status ReadLaunch(const Artifact& artifact, const KernelRecord& kernel, uint64_t group_items, GpuLaunch* out);
// Whether a pool may have so many blocks, the dummy block included.
Status CheckNumBlocks(const Artifact& artifact, uint32_t num_blocks);

}  // namespace llmc
