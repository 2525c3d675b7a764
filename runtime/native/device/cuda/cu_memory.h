// CuMemory: what an artifact's graphs work on, in memory of one GPU: weights, KV pools, arena, inputs and logits.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "artifact/artifact.h"
#include "core/status.h"
#include "device/cuda/cu_handles.h"
#include "device/gpu/device_memory.h"
#include "device/gpu/step_inputs.h"

namespace llmc {

class CuMemory {
 public:
  // Takes and fills all of it, in a scope of the machine; nothing is taken later. num_blocks: with the dummy block.
  static Status Make(CuMachinePtr machine, const Artifact& artifact, uint32_t num_blocks, CuStreamHandle stream,
                     std::unique_ptr<CuMemory>* out);

  uint32_t num_blocks() const { return num_blocks_; }
  const DeviceMemory& bytes() const { return bytes_; }
  CuPointer step() const { return step_.get(); }
  CuPointer logits() const { return logits_.get(); }
  CuPointer PlaceOf(const OperandRecord& operand, const StepLayout& inputs) const;
  // Copies a block of every layer, behind what is in the stream.
  Status CopyBlock(CuStreamHandle stream, uint32_t from, uint32_t to) const;
  // Fills the arena with zeros, behind what is in the stream.
  Status ClearArena(CuStreamHandle stream) const;

 private:
  explicit CuMemory(CuMachinePtr machine) : machine_(std::move(machine)) {}
  Status CheckRoom(const Artifact& artifact) const;
  Status LoadWeights(const Artifact& artifact);

  CuMachinePtr machine_;
  uint32_t num_blocks_ = 0;
  DeviceMemory bytes_;
  CuBuffer weights_, pool_, arena_, step_, logits_;
  std::vector<CuPointer> weight_at_, key_at_, value_at_;  // of a record; of a layer
};

}  // namespace llmc
