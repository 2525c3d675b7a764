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
#include "device/gpu/offload.h"
#include "device/gpu/step_inputs.h"

namespace llmc {

using CuState = GraphState<CuPointer>;
using CuWork = GraphWork<CuBuffer>;

// Call all functions in a scope of the machine.
class CuMemory {
 public:
  // Allocates and fills all but the work. rank: whose weights and layers it is for.
  // The stream's work has ended when this returns.
  static Status Make(CuMachinePtr machine, const Artifact& artifact, const PoolCounts& counts, uint32_t rank,
                     const OffloadOptions& offload, CuStreamHandle stream, std::unique_ptr<CuMemory>* out);

  const PoolCounts& counts() const { return counts_; }
  const DeviceMemory& bytes() const { return bytes_; }
  // Weights of the host, where they lie from `host_memory` on, and the ring of the device through which they are streamed.
  const Offload& offload() const { return offload_; }
  const unsigned char* host_memory() const { return static_cast<const unsigned char*>(host_weights_.get()); }
  CuPointer ring() const { return ring_.get(); }
  // Held while work is enqueued that writes the ring and reads it: other threads may enqueue graphs that do so, too.
  std::mutex& ring_mutex() const { return ring_mutex_; }
  // Time of reading weights and copying them to the GPU.
  uint64_t upload_ns() const { return upload_ns_; }
  // Memory for the graphs of an artifact with these weights and pools. The arena is zero once the stream's work has
  // ended.
  Status MakeWork(const Artifact& artifact, CuStreamHandle stream, CuWork* out) const;
  CuPointer PlaceOf(const OperandRecord& operand, const StepLayout& inputs, const CuWork& work) const;
  // Bytes of an entry in all layers of that kind.
  uint64_t entry_bytes(PoolKind kind) const { return entry_bytes_[kind]; }
  // Copies an entry of every layer of that kind, in the order of the stream.
  Status Copy(CuStreamHandle stream, PoolKind kind, uint32_t from, uint32_t to) const;
  // Copy an entry of every layer of that kind to the host's memory and back, in the order of the stream: layer after
  // layer, K before V. The memory is in use until the stream's work has ended.
  Status Read(CuStreamHandle stream, PoolKind kind, uint32_t entry, unsigned char* out) const;
  Status Write(CuStreamHandle stream, PoolKind kind, uint32_t entry, const unsigned char* from) const;
  // Allocates pinned memory of the host for entries of every layer.
  Status OpenSwapSpace(const PoolCounts& places);
  // Copy an entry to the swap space and back, in the order of the stream.
  Status Save(CuStreamHandle stream, PoolKind kind, uint32_t entry, uint32_t place) const;
  Status Load(CuStreamHandle stream, PoolKind kind, uint32_t place, uint32_t entry) const;
  // Fills a slot of every adapter pool and waits for it. Any thread may call it, beside work of other streams.
  Status LoadAdapter(uint32_t slot, const std::vector<AdapterMatrix>& matrices);
  // Fills the arena with zeros, in the order of the stream.
  Status ClearArena(CuStreamHandle stream, const CuWork& work) const;

 private:
  explicit CuMemory(CuMachinePtr machine) : machine_(std::move(machine)) {}
  Status CheckRoom(const Artifact& artifact) const;
  Status MakePools(const Artifact& artifact, CuStreamHandle stream);
  Status MakeAdapters(const Artifact& artifact, CuStreamHandle stream);
  Status LoadWeights(const Artifact& artifact);
  // Copy an entry of every layer, in the order of the stream. doing: for the error.
  Status ToHost(const char* doing, CuStreamHandle stream, PoolKind kind, uint32_t entry, unsigned char* out) const;
  Status FromHost(const char* doing, CuStreamHandle stream, PoolKind kind, uint32_t entry,
                  const unsigned char* from) const;
  // Calls visit(address of a layer's pool, bytes of an entry) for each part of an entry.
  template <class Visit>
  Status EachPart(PoolKind kind, Visit visit) const {
    return CuState::EachPart(bytes_, kind,
                             [&](auto pool, size_t layer, uint64_t bytes) { return visit((at_.*pool)[layer], bytes); });
  }
  // Address of an entry in the swap space: places of a kind follow each other, each with all layers.
  unsigned char* SavedAt(PoolKind kind, uint32_t place) const {
    return static_cast<unsigned char*>(swap_[kind].get()) + uint64_t{place} * entry_bytes_[kind];
  }

  CuMachinePtr machine_;
  PoolCounts counts_;
  uint32_t rank_ = 0;
  DeviceMemory bytes_;
  uint64_t upload_ns_ = 0;
  Offload offload_;
  CuBuffer weights_, ring_, pool_, adapters_;
  mutable std::mutex ring_mutex_;
  CuPinned host_weights_;
  CuState at_;
  OfKinds<CuPinned> swap_;
  OfKinds<uint64_t> entry_bytes_;
  std::vector<AdapterSlot> slots_;  // [linear with a pool]
  std::mutex adapter_mutex_;  // guards packed_ and adapter_stream_
  CuPinned packed_;
  CuStream adapter_stream_;
};

}  // namespace llmc
