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
#include "device/gpu/offload.h"
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
  // Allocates and fills all but the work. rank: whose weights and layers it is for. offload: without a ring. The queue's
  // work has ended when this returns.
  static Status Make(std::shared_ptr<const ClMachine> machine, const Artifact& artifact, const PoolCounts& counts,
                     uint32_t rank, const OffloadOptions& offload, cl_command_queue queue,
                     std::unique_ptr<ClMemory>* out);

  const PoolCounts& counts() const { return counts_; }
  const DeviceMemory& bytes() const { return bytes_; }
  const Offload& offload() const { return offload_; }
  // Memory for the graphs of an artifact with these weights and pools. The arena is zero once the queue's work has
  // ended.
  Status MakeWork(const Artifact& artifact, cl_command_queue queue, ClWork* out) const;
  ClPlace PlaceOf(const OperandRecord& operand, const StepLayout& inputs, const ClWork& work) const;
  // Copies an entry of every layer of that kind, in the order of the queue.
  Status Copy(cl_command_queue queue, PoolKind kind, uint32_t from, uint32_t to) const;
  // Copy an entry of every layer of that kind to the host's memory and back, in the order of the queue, and wait for it:
  // layer after layer, K before V.
  Status Read(cl_command_queue queue, PoolKind kind, uint32_t entry, unsigned char* out) const;
  Status Write(cl_command_queue queue, PoolKind kind, uint32_t entry, const unsigned char* from) const;
  // Allocates memory of the host that the driver keeps in place, for entries of every layer.
  Status OpenSwapSpace(const PoolCounts& places);
  // Copy an entry of every layer of that kind to the swap space and back, in the order of the queue.
  Status Save(cl_command_queue queue, PoolKind kind, uint32_t entry, uint32_t place) const;
  Status Load(cl_command_queue queue, PoolKind kind, uint32_t place, uint32_t entry) const;
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
  Status CopyBetween(cl_command_queue queue, PoolKind kind, const ClState& from, uint32_t from_entry, const ClState& to,
                     uint32_t to_entry) const;
  // enqueue: enqueues the copy of a part of a pool, given by its offset and its bytes, and returns OpenCL's code.
  template <class Enqueue>
  Status Pass(cl_command_queue queue, PoolKind kind, uint32_t entry, const char* doing, Enqueue enqueue) const;

  std::shared_ptr<const ClMachine> machine_;
  PoolCounts counts_;
  uint32_t rank_ = 0;
  DeviceMemory bytes_;
  Offload offload_;
  ClState state_, saved_;  // saved_: keys and values in the swap space
  std::vector<AdapterSlot> slots_;  // [linear with a pool]
  uint32_t num_slots_ = 0;
};

}  // namespace llmc
