// CuMemory: what an artifact's graphs work on, in memory of one GPU: weights, KV pools and adapters; CuWork: arena, inputs
// and logits.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "artifact/artifact.h"
#include "core/status.h"
#include "device/adapters.h"
#include "device/cuda/cu_handles.h"
#include "device/gpu/device_memory.h"
#include "device/gpu/step_inputs.h"

namespace llmc {

// What graphs work on that is no state: as much as the largest of an artifact's graphs needs.
struct CuWork {
  CuBuffer arena, step, logits;
  uint64_t arena_bytes = 0, step_bytes = 0, logit_bytes = 0;
};

// All of it in a scope of the machine.
class CuMemory {
 public:
  // Takes and fills all but the work. num_blocks: with the dummy block; offload_bytes: of weights, those that lie last, which
  // stay in the host's memory. The stream is done with it when this returns.
  static Status Make(CuMachinePtr machine, const Artifact& artifact, uint32_t num_blocks, uint64_t offload_bytes,
                     CuStreamHandle stream, std::unique_ptr<CuMemory>* out);

  uint32_t num_blocks() const { return num_blocks_; }
  const DeviceMemory& bytes() const { return bytes_; }
  uint64_t offloaded_bytes() const { return offloaded_bytes_; }
  // For the graphs of an artifact with these weights and pools. The arena is zero once the stream is there.
  Status MakeWork(const Artifact& artifact, CuStreamHandle stream, CuWork* out) const;
  CuPointer PlaceOf(const OperandRecord& operand, const StepLayout& inputs, const CuWork& work) const;
  // Copies a block of every layer, behind what is in the stream.
  Status CopyBlock(CuStreamHandle stream, uint32_t from, uint32_t to) const;
  // Pinned memory of the host for blocks of every layer.
  Status OpenSwapSpace(uint32_t num_places);
  // Copy a block to such a place, and back, behind what is in the stream.
  Status SaveBlock(CuStreamHandle stream, uint32_t block, uint32_t place) const;
  Status LoadBlock(CuStreamHandle stream, uint32_t place, uint32_t block) const;
  // Fills a slot of every pool of adapters; returns when they have it. Any thread, beside what is in other streams.
  Status LoadAdapter(uint32_t slot, const std::vector<AdapterMatrix>& matrices);
  // Fills the arena with zeros, behind what is in the stream.
  Status ClearArena(CuStreamHandle stream, const CuWork& work) const;

 private:
  explicit CuMemory(CuMachinePtr machine) : machine_(std::move(machine)) {}
  Status CheckRoom(const Artifact& artifact) const;
  Status MakePools(const Artifact& artifact, CuStreamHandle stream);
  Status MakeAdapters(const Artifact& artifact, CuStreamHandle stream);
  Status LoadWeights(const Artifact& artifact, uint64_t offload_bytes);
  // Where a block of a layer begins in the swap space: its places lie one after the other, with all layers of a block.
  unsigned char* SavedAt(uint32_t place) const {
    return static_cast<unsigned char*>(swap_.get()) + uint64_t{place} * saved_bytes_;
  }

  CuMachinePtr machine_;
  uint32_t num_blocks_ = 0;
  DeviceMemory bytes_;
  uint64_t offloaded_bytes_ = 0;
  CuBuffer weights_, pool_, adapters_;
  CuPinned host_weights_;
  std::vector<CuPointer> weight_at_, key_at_, value_at_, adapter_at_;  // of a record; of a layer; of a linear layer
  CuPinned swap_;
  uint64_t saved_bytes_ = 0;  // of a block in all layers
  std::vector<AdapterSlot> slots_;  // of each linear layer with a pool
  std::mutex adapter_mutex_;  // of what an adapter is copied by
  CuPinned packed_;
  CuStream adapter_stream_;
};

}  // namespace llmc
