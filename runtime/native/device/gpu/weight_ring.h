// The ring: device memory through which weights of the host are streamed. A load brings the weights of one command. This
// plans where in the ring each load lies, and which command has to end before it may begin.
#pragma once
#include <cstdint>
#include <vector>

#include "artifact/artifact.h"

namespace llmc {

// A weight in the host's memory: bytes [at, at + bytes) of that memory. bytes 0: it is on the device.
struct HostWeight {
  uint64_t at = 0, bytes = 0;
};

// A command, and weights of the host that it reads whole, ascending by place.
struct RingUse {
  uint32_t command = 0;
  std::vector<uint32_t> weights;
};

struct RingLoad {
  static constexpr uint32_t kNone = UINT32_MAX;
  struct Placed {
    uint32_t weight;
    uint64_t at;  // in the ring
  };
  struct Copy {
    uint64_t from, to, bytes;  // from: in the host's memory; to: in the ring
  };

  uint32_t first = 0, last = 0;  // commands that read it, and none between them reads another load
  uint32_t after = kNone;  // reads last what this load overwrites; kNone: nothing was there
  uint64_t at = 0, bytes = 0;
  std::vector<Placed> weights;
  std::vector<Copy> copies;
};

// Weights that the commands of a graph read whole, of those that a rank of `stage` runs. weights: as operands name them.
std::vector<RingUse> RingUsesOf(const Artifact& artifact, const GraphRecord& graph, uint32_t stage,
                                const std::vector<HostWeight>& weights);

// Bytes of a ring for these commands: the least in which a load never overwrites the one before it, so that it is copied
// while kernels read that one. Loads of more than half of `limit` do not count.
uint64_t RingBytes(const std::vector<RingUse>& uses, const std::vector<HostWeight>& weights, uint64_t limit);

// The loads of a run of commands, in order. What does not fit into the ring has none: it is read in place.
std::vector<RingLoad> PlanRing(const std::vector<RingUse>& uses, const std::vector<HostWeight>& weights,
                               uint64_t ring_bytes);

}  // namespace llmc
