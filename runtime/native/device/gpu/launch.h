// Facts that all devices with launched kernels read of an artifact: its target, and launch sizes of kernels.
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

// Whether a command that calls the kernel reads all bytes of its weights. False: some of them, or nobody knows.
bool ReadsWholeWeights(const KernelRecord& kernel);

Status UnsupportedArtifact(const Artifact& artifact, const std::string& what);
// Checks that the artifact is for devices of `kind` at a level of at most max_level, and uses nothing that these lack.
Status CheckGpuTarget(const Artifact& artifact, const std::string& kind, uint32_t max_level);
// group_items: most work items in a group of the device.
Status ReadLaunch(const Artifact& artifact, const KernelRecord& kernel, uint64_t group_items, GpuLaunch* out);

}  // namespace llmc
