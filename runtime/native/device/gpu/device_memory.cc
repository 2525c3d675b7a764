#include "device/gpu/device_memory.h"

#include <algorithm>

#include "device/gpu/step_inputs.h"

namespace llmc {

std::string MemorySize(uint64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

DeviceMemory DeviceMemory::Of(const Artifact& artifact, const PoolCounts& counts, uint32_t rank) {
  DeviceMemory of;
  const StageRecord stage = artifact.layers_of(artifact.stage_of(rank));
  of.first_layer = stage.first_layer;
  for (uint32_t layer = stage.first_layer; layer < stage.first_layer + stage.num_layers; ++layer) {
    const LayerPools pools = {PoolKindOf(artifact, layer), artifact.kv_layer(layer)};
    of.layers.push_back(pools);
    of.pools[pools.kind] += (pools.bytes.key_block_bytes + pools.bytes.value_block_bytes) * counts[pools.kind];
  }
  of.arena = std::max<uint64_t>(artifact.max_arena_bytes(), kAlignment);
  uint64_t max_tokens = 0;
  for (const GraphRecord& graph : artifact.graphs()) {
    of.step = std::max(of.step, StepLayout::Of(graph).bytes);
    of.max_samples = std::max(of.max_samples, graph.max_samples);
    max_tokens = std::max<uint64_t>(max_tokens, graph.max_tokens);
  }
  of.hidden = RoundUp(max_tokens * static_cast<uint32_t>(artifact.shape().states_width) * sizeof(float), kAlignment);
  of.logits = RoundUp(uint64_t{of.max_samples} * artifact.shape().output_width() * sizeof(float), kAlignment);
  for (const WeightRecord* weight : WeightsOfRank(artifact, rank)) of.weights += weight == nullptr ? 0 : weight->bytes;
  for (const AdapterSlot& slot : artifact.shape().adapters)
    of.adapters += slot.bytes() * artifact.shape().adapter_slots;
  return of;
}

Status DeviceMemory::CheckFits(const Artifact& artifact, const std::string& name, uint64_t bytes,
                               const std::string& of) const {
  if (total() <= bytes) return Status::Ok();
  return Status::Error(
      LLMC_ERR_OUT_OF_MEMORY,
      "the artifact '" + artifact.directory() + "' needs " + MemorySize(total()) + " (weights " + MemorySize(weights) +
          ", KV pool " + MemorySize(pools.blocks) + (pools.states == 0 ? "" : ", states " + MemorySize(pools.states)) +
          (adapters == 0 ? "" : ", adapters " + MemorySize(adapters)) + ", arena " + MemorySize(arena) + ") and '" +
          name + "' has " + MemorySize(bytes) + (of.empty() ? "" : " " + of) +
          "; ask for a smaller KV pool by --gpu-memory-utilization or --kv-bytes, keep weights on the "
          "host by --cpu-offload-gib, or choose another device");
}

std::vector<const WeightRecord*> WeightsOfRank(const Artifact& artifact, uint32_t rank) {
  const std::vector<bool> read = artifact.WeightsOf(artifact.stage_of(rank));
  std::vector<const WeightRecord*> weights(read.size(), nullptr);
  for (uint32_t i = 0; i < read.size(); ++i) {
    if (read[i]) weights[i] = &artifact.weights()[artifact.weight_of(i, rank)];
  }
  return weights;
}

}  // namespace llmc
