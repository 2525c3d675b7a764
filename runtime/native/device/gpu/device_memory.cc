#include "device/gpu/device_memory.h"

#include <algorithm>

#include "device/gpu/step_inputs.h"

namespace llmc {

std::string MemorySize(uint64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

DeviceMemory DeviceMemory::Of(const Artifact& artifact, uint32_t num_blocks) {
  DeviceMemory of;
  of.key_block = artifact.key_block_bytes();
  of.value_block = artifact.value_block_bytes();
  of.arena = std::max<uint64_t>(artifact.max_arena_bytes(), kAlignment);
  for (const GraphRecord& graph : artifact.graphs()) {
    of.step = std::max(of.step, StepLayout::Of(graph).bytes);
    of.max_samples = std::max(of.max_samples, graph.max_samples);
  }
  of.logits = RoundUp(uint64_t{of.max_samples} * artifact.shape().output_width() * sizeof(float), kAlignment);
  for (const WeightRecord& weight : artifact.weights()) of.weights += weight.bytes;
  for (const AdapterSlot& slot : artifact.shape().adapters)
    of.adapters += slot.bytes() * artifact.shape().adapter_slots;
  of.pool = (of.key_block + of.value_block) * num_blocks * static_cast<uint64_t>(artifact.model().num_layers);
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
  return Status::Error(LLMC_ERR_OUT_OF_MEMORY,
                       "the artifact '" + artifact.directory() + "' needs " + MemorySize(total()) + " (weights " +
                           MemorySize(weights) + ", KV pool " + MemorySize(pool) +
                           (adapters == 0 ? "" : ", adapters " + MemorySize(adapters)) + ", arena " +
                           MemorySize(arena) + ") and '" + name + "' has " + MemorySize(bytes) +
                           (of.empty() ? "" : " " + of) + "; ask for a smaller KV pool, or choose another device");
}

Status CheckCopy(uint32_t from, uint32_t to, uint32_t num_blocks) {
  if (from < num_blocks && to < num_blocks) return Status::Ok();
  return Status::Error(LLMC_ERR_OUT_OF_RANGE, "cannot copy KV block " + std::to_string(from) + " to " +
                                                  std::to_string(to) + "; the pool has " + std::to_string(num_blocks) +
                                                  " blocks");
}

}  // namespace llmc
