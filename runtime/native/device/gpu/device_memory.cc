#include "device/gpu/device_memory.h"

#include <algorithm>

#include "device/gpu/step_inputs.h"

namespace llmc {

std::string MemorySize(uint64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

DeviceMemory DeviceMemory::Of(const Artifact& artifact, uint32_t num_blocks, uint32_t rank) {
  DeviceMemory of;
  const StageRecord stage = artifact.layers_of(artifact.stage_of(rank));
  of.first_layer = stage.first_layer;
  for (uint32_t i = 0; i < stage.num_layers; ++i) {
    of.layers.push_back(artifact.kv_layer(stage.first_layer + i));
    of.pool += (of.layers.back().key_block_bytes + of.layers.back().value_block_bytes) * num_blocks;
  }
  of.arena = std::max<uint64_t>(artifact.max_arena_bytes(), kAlignment);
  for (const GraphRecord& graph : artifact.graphs()) {
    of.step = std::max(of.step, StepLayout::Of(graph).bytes);
    of.max_samples = std::max(of.max_samples, graph.max_samples);
  }
  of.logits = RoundUp(uint64_t{of.max_samples} * artifact.shape().output_width() * sizeof(float), kAlignment);
  for (const WeightRecord* weight : WeightsOfRank(artifact, rank)) of.weights += weight == nullptr ? 0 : weight->bytes;
  for (const AdapterSlot& slot : artifact.shape().adapters)
    of.adapters += slot.bytes() * artifact.shape().adapter_slots;
  return of;
}

Status DeviceMemory::CheckFits(const Artifact& artifact, const std::string& name, uint64_t bytes,
                               const std::string& of) const {
  if (artifact.shape().states_width > 0) {
    return Status::Error(LLMC_ERR_UNSUPPORTED_TARGET, "the artifact '" + artifact.directory() +
                                                          "' leaves hidden states, which '" + name +
                                                          "' has no memory for yet; compile it without --eagle");
  }
  if (total() <= bytes) return Status::Ok();
  return Status::Error(
      LLMC_ERR_OUT_OF_MEMORY,
      "the artifact '" + artifact.directory() + "' needs " + MemorySize(total()) + " (weights " + MemorySize(weights) +
          ", KV pool " + MemorySize(pool) + (adapters == 0 ? "" : ", adapters " + MemorySize(adapters)) + ", arena " +
          MemorySize(arena) + ") and '" + name + "' has " + MemorySize(bytes) + (of.empty() ? "" : " " + of) +
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

Status CheckCopy(uint32_t from, uint32_t to, uint32_t num_blocks) {
  if (from < num_blocks && to < num_blocks) return Status::Ok();
  return Status::Error(LLMC_ERR_OUT_OF_RANGE, "cannot copy KV block " + std::to_string(from) + " to " +
                                                  std::to_string(to) + "; the pool has " + std::to_string(num_blocks) +
                                                  " blocks");
}

}  // namespace llmc
