// ClMemory: state of an artifact's graphs in buffers of one device: weights, KV pools and adapters. ClWork: arena,
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
#include "device/gpu/graph_memory.h"
#include "device/gpu/owned.h"
#include "device/gpu/step_inputs.h"
#include "device/opencl/cl_machine.h"

namespace llmc {

struct ClFreeMemory {
  void operator()(const ClMachine& cl, cl_mem memory) const { cl->ReleaseMemObject(memory); }
};
using ClBuffer = Owned<ClMachine, cl_mem, ClFreeMemory>;

// An operand of a command: its buffer, and its offset there in units of kAlignment bytes (FORMAT.md).
struct ClPlace {
  cl_mem memory;
  cl_int at;
};

using ClState = GraphState<ClBuffer>;
using ClWork = GraphWork<ClBuffer>;

class ClMemory {
 public:
  // Allocates and fills all but the work. num_blocks: with the dummy block. rank: whose weights and layers it is for.
  // offload_bytes: weights to leave in the host's memory, the last ones. The queue's work has ended when this returns.
  static Status Make(std::shared_ptr<const ClMachine> machine, const Artifact& artifact, uint32_t num_blocks,
                     uint32_t rank, uint64_t offload_bytes, cl_command_queue queue, std::unique_ptr<ClMemory>* out);

  uint32_t num_blocks() const { return num_blocks_; }
  const DeviceMemory& bytes() const { return bytes_; }
  uint64_t offloaded_bytes() const { return offloaded_bytes_; }
  // Memory for the graphs of an artifact with these weights and pools. The arena is zero once the queue's work has
  // ended.
  Status MakeWork(const Artifact& artifact, cl_command_queue queue, ClWork* out) const;
  ClPlace PlaceOf(const OperandRecord& operand, const StepLayout& inputs, const ClWork& work) const;
  // Copies a block of every layer, in the order of the queue.
  Status CopyBlock(cl_command_queue queue, uint32_t from, uint32_t to) const;
  // Copy a block of every layer to the host's memory and back, in the order of the queue, and wait for it: layer after
  // layer, K before V.
  Status ReadBlock(cl_command_queue queue, uint32_t block, unsigned char* out) const;
  Status WriteBlock(cl_command_queue queue, uint32_t block, const unsigned char* from) const;
  // Allocates memory of the host that the driver keeps in place, for blocks of every layer.
  Status OpenSwapSpace(uint32_t num_places);
  uint32_t num_places() const { return num_places_; }
  // Copy a block of every layer to the swap space and back, in the order of the queue.
  Status SaveBlock(cl_command_queue queue, uint32_t block, uint32_t place) const;
  Status LoadBlock(cl_command_queue queue, uint32_t place, uint32_t block) const;
  // Fills a slot of every adapter pool, in the order of the queue, and waits for it.
  Status LoadAdapter(cl_command_queue queue, uint32_t slot, const std::vector<AdapterMatrix>& matrices) const;
  // Fills the arena with zeros, in the order of the queue.
  Status ClearArena(cl_command_queue queue, const ClWork& work) const {
    return Fill(queue, work.arena, work.arena_bytes);
  }

  Status Allocate(const std::string& what, uint64_t bytes, cl_bitfield flags, ClBuffer* out) const;

 private:
  explicit ClMemory(std::shared_ptr<const ClMachine> machine) : machine_(std::move(machine)) {}
  Status Fill(cl_command_queue queue, const ClBuffer& buffer, uint64_t bytes) const;
  Status LoadWeights(const Artifact& artifact, cl_command_queue queue);
  Status MakeAdapters(cl_command_queue queue);
  Status CopyBetween(cl_command_queue queue, const ClState& from, uint32_t from_block, const ClState& to,
                     uint32_t to_block) const;
  // copy: enqueues the copy of a part of a pool, given by its offset and its bytes, and returns OpenCL's code.
  template <class Copy>
  Status PassBlock(cl_command_queue queue, uint32_t block, const char* doing, Copy copy) const;
  // Calls visit(member of ClState, layer, bytes) for each part of a KV block.
  template <class Visit>
  Status EachKv(Visit visit) const {
    return ClState::EachKv(bytes_, visit);
  }

  std::shared_ptr<const ClMachine> machine_;
  uint32_t num_blocks_ = 0, rank_ = 0;
  DeviceMemory bytes_;
  uint64_t offloaded_bytes_ = 0;
  size_t first_offloaded_ = 0;
  ClState state_, saved_;  // saved_: keys and values in the swap space
  std::vector<AdapterSlot> slots_;  // [linear with a pool]
  uint32_t num_slots_ = 0, num_places_ = 0;
};

}  // namespace llmc
