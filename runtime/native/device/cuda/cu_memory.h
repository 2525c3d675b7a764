// CuMemory: state of an artifact's graphs in memory of one GPU: weights, KV pools and adapters. CuWork: arena, inputs
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
#include "device/gpu/graph_memory.h"
#include "device/gpu/step_inputs.h"

namespace llmc {

using CuState = GraphState<CuPointer>;
using CuWork = GraphWork<CuBuffer>;

// Call all functions in a scope of the machine.
class CuMemory {
 public:
  // Allocates and fills all but the work. num_blocks: with the dummy block. rank: whose weights and layers it is for.
  // offload_bytes: weights to leave in the host's memory, those at the file's end. The stream's work has ended when this
  // returns.
  static Status Make(CuMachinePtr machine, const Artifact& artifact, uint32_t num_blocks, uint32_t rank,
                     uint64_t offload_bytes, CuStreamHandle stream, std::unique_ptr<CuMemory>* out);

  uint32_t num_blocks() const { return num_blocks_; }
  const DeviceMemory& bytes() const { return bytes_; }
  uint64_t offloaded_bytes() const { return offloaded_bytes_; }
  // Time of reading weights and copying them to the GPU.
  uint64_t upload_ns() const { return upload_ns_; }
  // Memory for the graphs of an artifact with these weights and pools. The arena is zero once the stream's work has
  // ended.
  Status MakeWork(const Artifact& artifact, CuStreamHandle stream, CuWork* out) const;
  CuPointer PlaceOf(const OperandRecord& operand, const StepLayout& inputs, const CuWork& work) const;
  // Copies a block of every layer, in the order of the stream.
  Status CopyBlock(CuStreamHandle stream, uint32_t from, uint32_t to) const;
  // Copy a block of every layer to the host's memory and back, in the order of the stream: layer after layer, K before
  // V. The memory is in use until the stream's work has ended.
  Status ReadBlock(CuStreamHandle stream, uint32_t block, unsigned char* out) const;
  Status WriteBlock(CuStreamHandle stream, uint32_t block, const unsigned char* from) const;
  // Allocates pinned memory of the host for blocks of every layer.
  Status OpenSwapSpace(uint32_t num_places);
  // Copy a block to the swap space and back, in the order of the stream.
  Status SaveBlock(CuStreamHandle stream, uint32_t block, uint32_t place) const;
  Status LoadBlock(CuStreamHandle stream, uint32_t place, uint32_t block) const;
  // Fills a slot of every adapter pool and waits for it. Any thread may call it, beside work of other streams.
  Status LoadAdapter(uint32_t slot, const std::vector<AdapterMatrix>& matrices);
  // Fills the arena with zeros, in the order of the stream.
  Status ClearArena(CuStreamHandle stream, const CuWork& work) const;

 private:
  explicit CuMemory(CuMachinePtr machine) : machine_(std::move(machine)) {}
  Status CheckRoom(const Artifact& artifact) const;
  Status MakePools(const Artifact& artifact, CuStreamHandle stream);
  Status MakeAdapters(const Artifact& artifact, CuStreamHandle stream);
  Status LoadWeights(const Artifact& artifact, uint64_t offload_bytes);
  // Copy a block of every layer, in the order of the stream. doing: for the error.
  Status ToHost(const char* doing, CuStreamHandle stream, uint32_t block, unsigned char* out) const;
  Status FromHost(const char* doing, CuStreamHandle stream, uint32_t block, const unsigned char* from) const;
  // Calls visit(address of a layer's pool, bytes of a block) for each part of a KV block.
  template <class Visit>
  Status EachKv(Visit visit) const {
    return CuState::EachKv(bytes_,
                           [&](auto pool, size_t layer, uint64_t bytes) { return visit((at_.*pool)[layer], bytes); });
  }
  // Address of a block of a layer in the swap space: places follow each other, each with all layers of a block.
  unsigned char* SavedAt(uint32_t place) const {
    return static_cast<unsigned char*>(swap_.get()) + uint64_t{place} * saved_bytes_;
  }

  CuMachinePtr machine_;
  uint32_t num_blocks_ = 0, rank_ = 0;
  DeviceMemory bytes_;
  uint64_t offloaded_bytes_ = 0, upload_ns_ = 0;
  CuBuffer weights_, pool_, adapters_;
  CuPinned host_weights_;
  CuState at_;
  CuPinned swap_;
  uint64_t saved_bytes_ = 0;  // bytes of a block in all layers
  std::vector<AdapterSlot> slots_;  // [linear with a pool]
  std::mutex adapter_mutex_;  // guards packed_ and adapter_stream_
  CuPinned packed_;
  CuStream adapter_stream_;
};

}  // namespace llmc
