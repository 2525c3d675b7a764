// ClMemory: what an artifact's graphs work on, in buffers of one device: weights, KV pools and adapters; ClWork: arena,
// inputs and logits.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "artifact/artifact.h"
#include "core/status.h"
#include "device/adapters.h"
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

// What graphs work on that is no state: as much as the largest of an artifact's graphs needs.
struct ClWork {
  ClBuffer arena, step, logits;
  uint64_t arena_bytes = 0, step_bytes = 0, logit_bytes = 0;
};

class ClMemory {
 public:
  // Takes and fills all but the work; num_blocks: with the dummy block; offload_bytes: of weights, the last ones, that stay
  // in the host's memory. The queue is done with it when this returns.
  static Status Make(std::shared_ptr<const ClMachine> machine, const Artifact& artifact, uint32_t num_blocks,
                     uint64_t offload_bytes, cl_command_queue queue, std::unique_ptr<ClMemory>* out);

  uint32_t num_blocks() const { return num_blocks_; }
  uint64_t weight_bytes() const { return bytes_.weights; }
  uint64_t offloaded_bytes() const { return offloaded_bytes_; }
  uint64_t pool_bytes() const { return bytes_.pool; }
  // For the graphs of an artifact with these weights and pools. The arena is zero once the queue is there.
  Status MakeWork(const Artifact& artifact, cl_command_queue queue, ClWork* out) const;
  ClPlace PlaceOf(const OperandRecord& operand, const StepLayout& inputs, const ClWork& work) const;
  // Copies a block of every layer, behind what is in the queue.
  Status CopyBlock(cl_command_queue queue, uint32_t from, uint32_t to) const;
  // Memory of the host that the driver keeps in place, for blocks of every layer.
  Status OpenSwapSpace(uint32_t num_places);
  uint32_t num_places() const { return num_places_; }
  // The same for a block and a place there, and back.
  Status SaveBlock(cl_command_queue queue, uint32_t block, uint32_t place) const;
  Status LoadBlock(cl_command_queue queue, uint32_t place, uint32_t block) const;
  // Fills a slot of every pool of adapters, behind what is in the queue; returns when it has them.
  Status LoadAdapter(cl_command_queue queue, uint32_t slot, const std::vector<AdapterMatrix>& matrices) const;
  // Fills the arena with zeros, behind what is in the queue.
  Status ClearArena(cl_command_queue queue, const ClWork& work) const {
    return Fill(queue, work.arena, work.arena_bytes);
  }

  Status Allocate(const std::string& what, uint64_t bytes, cl_bitfield flags, ClBuffer* out) const;

 private:
  explicit ClMemory(std::shared_ptr<const ClMachine> machine) : machine_(std::move(machine)) {}
  Status Fill(cl_command_queue queue, const ClBuffer& buffer, uint64_t bytes) const;
  Status LoadWeights(const Artifact& artifact, cl_command_queue queue);
  Status MakeAdapters(cl_command_queue queue);
  // A pool of each layer: keys, then values.
  using Pools = const std::vector<ClBuffer>* [2];
  Status CopyBetween(cl_command_queue queue, const Pools& from, uint32_t from_block, const Pools& to,
                     uint32_t to_block) const;

  std::shared_ptr<const ClMachine> machine_;
  uint32_t num_blocks_ = 0;
  DeviceMemory bytes_;
  uint64_t offloaded_bytes_ = 0;
  size_t first_offloaded_ = 0;
  std::vector<ClBuffer> weights_, keys_, values_;  // a record; a layer
  std::vector<AdapterSlot> slots_;  // of each layer with a pool
  std::vector<ClBuffer> adapters_;  // its pool
  uint32_t num_slots_ = 0, num_places_ = 0;
  std::vector<ClBuffer> saved_keys_, saved_values_;  // of the swap space, a layer
};

}  // namespace llmc
