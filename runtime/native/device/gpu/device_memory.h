// Device memory that an artifact's graphs need, in bytes.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "artifact/artifact.h"
#include "core/status.h"
#include "device/pool_kind.h"

namespace llmc {

struct LayerPools {
  PoolKind kind;
  KvLayerRecord bytes;  // of an entry
};

struct DeviceMemory {
  uint64_t weights = 0, adapters = 0, arena = 0, step = 0, logits = 0;
  uint64_t hidden = 0;  // hidden states of rows
  OfKinds<uint64_t> pools;
  uint32_t first_layer = 0;        // of those that have pools
  std::vector<LayerPools> layers;  // these
  uint32_t max_samples = 1;        // of any graph

  // rank: whose part of the artifact it is.
  static DeviceMemory Of(const Artifact& artifact, const PoolCounts& counts, uint32_t rank);
  uint64_t total() const { return weights + pools.blocks + pools.states + adapters + arena + step + logits + hidden; }
  // Whether a device called `name` with `bytes` bytes has room for it. of: what these bytes are, for the error.
  Status CheckFits(const Artifact& artifact, const std::string& name, uint64_t bytes, const std::string& of = "") const;
};

// The weights that a rank reads, as its operands name them; nullptr: one that it does not read.
std::vector<const WeightRecord*> WeightsOfRank(const Artifact& artifact, uint32_t rank);

// Bytes as text with a unit.
std::string MemorySize(uint64_t bytes);

}  // namespace llmc
