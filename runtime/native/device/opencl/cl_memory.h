// ClMemory: what an artifact's graphs work on, in buffers of one device: weights, KV pools, arena, inputs and logits.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "artifact/artifact.h"
#include "core/status.h"
#include "device/gpu/device_memory.h"
#include "device/gpu/step_inputs.h"
#include "device/opencl/cl_machine.h"

namespace llmc {

// Owns a buffer.
class ClBuffer {
 public:
  ClBuffer() = default;
  ClBuffer(std::shared_ptr<const ClMachine> machine, cl_mem memory) : machine_(std::move(machine)), memory_(memory) {}
  ClBuffer(ClBuffer&& other) noexcept
      : machine_(std::move(other.machine_)), memory_(std::exchange(other.memory_, nullptr)) {}
  ClBuffer& operator=(ClBuffer&& other) noexcept {
    std::swap(machine_, other.machine_);
    std::swap(memory_, other.memory_);
    return *this;
  }
  ~ClBuffer() {
    if (memory_ != nullptr) (*machine_)->ReleaseMemObject(memory_);
  }

  cl_mem get() const { return memory_; }

 private:
  std::shared_ptr<const ClMachine> machine_;
  cl_mem memory_ = nullptr;
};

// An operand of a command: a buffer, and where it begins there, in units of kAlignment bytes (FORMAT.md).
struct ClPlace {
  cl_mem memory;
  cl_int at;
};

class ClMemory {
 public:
  // Takes and fills all of it; num_blocks: with the dummy block. The queue is done with it when this returns.
  static Status Make(std::shared_ptr<const ClMachine> machine, const Artifact& artifact, uint32_t num_blocks,
                     cl_command_queue queue, std::unique_ptr<ClMemory>* out);

  uint32_t num_blocks() const { return num_blocks_; }
  uint64_t weight_bytes() const { return bytes_.weights; }
  uint64_t pool_bytes() const { return bytes_.pool; }
  cl_mem step() const { return step_.get(); }
  cl_mem logits() const { return logits_.get(); }
  ClPlace PlaceOf(const OperandRecord& operand, const StepLayout& inputs) const;
  // Copies a block of every layer, behind what is in the queue.
  Status CopyBlock(cl_command_queue queue, uint32_t from, uint32_t to) const;
  // Fills the arena with zeros, behind what is in the queue.
  Status ClearArena(cl_command_queue queue) const;

 private:
  explicit ClMemory(std::shared_ptr<const ClMachine> machine) : machine_(std::move(machine)) {}
  Status Allocate(const std::string& what, uint64_t bytes, bool read_only, ClBuffer* out) const;
  Status Fill(cl_command_queue queue, const ClBuffer& buffer, uint64_t bytes) const;
  Status LoadWeights(const Artifact& artifact, cl_command_queue queue);

  std::shared_ptr<const ClMachine> machine_;
  uint32_t num_blocks_ = 0;
  DeviceMemory bytes_;
  std::vector<ClBuffer> weights_, keys_, values_;  // a record; a layer
  ClBuffer arena_, step_, logits_;
};

}  // namespace llmc
