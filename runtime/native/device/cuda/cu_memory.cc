#include "device/cuda/cu_memory.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "device/cuda/cu_staging.h"

namespace llmc {

Status CuMemory::Make(CuMachinePtr machine, const Artifact& artifact, const PoolCounts& counts, uint32_t rank,
                      const OffloadOptions& offload, CuStreamHandle stream, std::unique_ptr<CuMemory>* out) {
  std::unique_ptr<CuMemory> made(new CuMemory(std::move(machine)));
  const CuMachinePtr& cuda = made->machine_;
  made->counts_ = counts;
  made->rank_ = rank;
  made->bytes_ = DeviceMemory::Of(artifact, counts, rank);
  made->offload_ = Offload::Of(artifact, rank, offload);
  const CuDrain drain(*cuda, stream);
  LLMC_RETURN_IF_ERROR(made->LoadWeights(artifact));
  LLMC_RETURN_IF_ERROR(made->MakePools(artifact, stream));
  LLMC_RETURN_IF_ERROR(made->MakeAdapters(artifact, stream));
  LLMC_RETURN_IF_ERROR(cuda->Check("Filling the GPU's memory", (*cuda)->StreamSynchronize(stream)));
  *out = std::move(made);
  return Status::Ok();
}

Status CuMemory::CheckRoom(const Artifact& artifact) const {
  DeviceMemory taken = bytes_;
  taken.weights += offload_.ring_bytes() - offload_.bytes();
  LLMC_RETURN_IF_ERROR(taken.CheckFits(artifact, machine_->name(), machine_->memory_bytes()));
  uint64_t free = 0;
  LLMC_RETURN_IF_ERROR(machine_->FreeBytes(&free));
  return taken.CheckFits(artifact, machine_->name(), free, "free");
}

Status CuMemory::MakeWork(const Artifact& artifact, CuStreamHandle stream, CuWork* out) const {
  CuWork made;
  const auto take = [this](const char* what, uint64_t bytes, CuBuffer* buffer) {
    return TakeMemory(machine_, what, bytes, buffer);
  };
  LLMC_RETURN_IF_ERROR(CuWork::Make(DeviceMemory::Of(artifact, counts_, rank_), take, &made));
  const CuDrain drain(*machine_, stream);
  LLMC_RETURN_IF_ERROR(ClearArena(stream, made));
  if (made.hidden_bytes > 0) {
    LLMC_RETURN_IF_ERROR(machine_->Check("Clearing hidden states",
                                         (*machine_)->Memset(made.hidden.get(), 0, made.hidden_bytes, stream)));
  }
  *out = std::move(made);
  return Status::Ok();
}

Status CuMemory::MakePools(const Artifact& artifact, CuStreamHandle stream) {
  const uint64_t bytes = bytes_.pools.blocks + bytes_.pools.states;
  if (bytes > 0) {
    LLMC_RETURN_IF_ERROR(TakeMemory(machine_, "the KV pool", bytes, &pool_));
    LLMC_RETURN_IF_ERROR(machine_->Check("Clearing the KV pool", (*machine_)->Memset(pool_.get(), 0, bytes, stream)));
  }
  const auto num_layers = static_cast<size_t>(artifact.model().num_layers);
  at_.keys.resize(num_layers);
  at_.values.resize(num_layers);
  CuPointer at = pool_.get();
  for (const PoolKind kind : kPoolKinds) {
    LLMC_RETURN_IF_ERROR(CuState::EachPart(bytes_, kind, [&](auto pool, size_t layer, uint64_t entry) {
      (at_.*pool)[layer] = at;
      at += entry * counts_[kind];
      entry_bytes_[kind] += entry;
      return Status::Ok();
    }));
  }
  return Status::Ok();
}

// Clears all slots: rank 0 means no adapter.
Status CuMemory::MakeAdapters(const Artifact& artifact, CuStreamHandle stream) {
  slots_ = artifact.shape().adapters;
  if (slots_.empty()) return Status::Ok();
  LLMC_RETURN_IF_ERROR(TakeMemory(machine_, "slots of adapters", bytes_.adapters, &adapters_));
  LLMC_RETURN_IF_ERROR(
      machine_->Check("Clearing slots of adapters", (*machine_)->Memset(adapters_.get(), 0, bytes_.adapters, stream)));
  CuPointer at = adapters_.get();
  uint64_t largest = 0;
  for (const AdapterSlot& slot : slots_) {
    at_.adapters.push_back(at);
    at += slot.bytes() * artifact.shape().adapter_slots;
    largest = std::max<uint64_t>(largest, slot.bytes());
  }
  LLMC_RETURN_IF_ERROR(TakePinned(machine_, "an adapter on its way", largest, &packed_));
  return MakeStream(machine_, &adapter_stream_);
}

Status CuMemory::LoadAdapter(uint32_t slot, const std::vector<AdapterMatrix>& matrices) {
  const std::lock_guard<std::mutex> lock(adapter_mutex_);
  for (uint32_t linear = 0; linear < slots_.size(); ++linear) {
    const uint64_t bytes = slots_[linear].bytes();
    PackAdapter(slots_[linear], linear, matrices, static_cast<char*>(packed_.get()));
    LLMC_RETURN_IF_ERROR(machine_->Check(
        "Copying an adapter to the GPU",
        (*machine_)->MemcpyToDevice(at_.adapters[linear] + slot * bytes, packed_.get(), bytes, adapter_stream_.get())));
    // packed_ is reused for the next linear: wait until the copy has read it.
    LLMC_RETURN_IF_ERROR(
        machine_->Check("Copying an adapter to the GPU", (*machine_)->StreamSynchronize(adapter_stream_.get())));
  }
  return Status::Ok();
}

// Weights keep the order of the file, so that neighbours there are one copy.
Status CuMemory::LoadWeights(const Artifact& artifact) {
  LLMC_RETURN_IF_ERROR(CheckRoom(artifact));
  const FileRuns &stay = offload_.stay(), &leave = offload_.leave();
  CuPointer host = 0;
  if (stay.bytes() > 0) LLMC_RETURN_IF_ERROR(TakeMemory(machine_, "weights", stay.bytes(), &weights_));
  if (leave.bytes() > 0) {
    LLMC_RETURN_IF_ERROR(TakePinned(machine_, "weights of --cpu-offload-gib", leave.bytes(), &host_weights_));
    LLMC_RETURN_IF_ERROR(machine_->Check("Finding weights of the host",
                                         (*machine_)->MemHostGetDevicePointer(&host, host_weights_.get(), 0)));
    for (const FileRun& run : leave.runs()) {
      LLMC_RETURN_IF_ERROR(artifact.weight_file().Read(run.begin, run.end - run.begin,
                                                       static_cast<unsigned char*>(host_weights_.get()) + run.at));
    }
  }
  if (offload_.ring_bytes() > 0) {
    LLMC_RETURN_IF_ERROR(TakeMemory(machine_, "the ring of offloaded weights", offload_.ring_bytes(), &ring_));
  }
  for (const WeightRecord* weight : WeightsOfRank(artifact, rank_)) {
    CuPointer at = 0;
    if (weight != nullptr) {
      at = stay.Holds(*weight) ? weights_.get() + stay.At(*weight) : host + leave.At(*weight);
    }
    at_.weights.push_back(at);
  }
  const auto begin = std::chrono::steady_clock::now();
  for (const FileRun& run : stay.runs()) {
    LLMC_RETURN_IF_ERROR(
        CopyFileToDevice(machine_, artifact.weight_file(), run.begin, run.end - run.begin, weights_.get() + run.at));
  }
  const std::chrono::nanoseconds took = std::chrono::steady_clock::now() - begin;
  upload_ns_ = static_cast<uint64_t>(took.count());
  return Status::Ok();
}

Status CuMemory::ClearArena(CuStreamHandle stream, const CuWork& work) const {
  return machine_->Check("Clearing the arena", (*machine_)->Memset(work.arena.get(), 0, work.arena_bytes, stream));
}

CuPointer CuMemory::PlaceOf(const OperandRecord& operand, const StepLayout& inputs, const CuWork& work) const {
  const auto place = PlaceOfOperand<CuPointer>(operand, inputs, at_, work);
  return place.memory + place.offset;
}

Status CuMemory::Copy(CuStreamHandle stream, PoolKind kind, uint32_t from, uint32_t to) const {
  LLMC_RETURN_IF_ERROR(CheckCopy(kind, from, to, counts_[kind]));
  if (from == to) return Status::Ok();
  return EachPart(kind, [&](CuPointer pool, uint64_t bytes) {
    return machine_->Check(TextOf(kind, "Copying a KV block", "Copying states"),
                           (*machine_)->MemcpyOnDevice(pool + to * bytes, pool + from * bytes, bytes, stream));
  });
}

Status CuMemory::ToHost(const char* doing, CuStreamHandle stream, PoolKind kind, uint32_t entry,
                        unsigned char* out) const {
  return EachPart(kind, [&](CuPointer pool, uint64_t bytes) {
    const Status status = machine_->Check(doing, (*machine_)->MemcpyToHost(out, pool + entry * bytes, bytes, stream));
    out += bytes;
    return status;
  });
}

Status CuMemory::FromHost(const char* doing, CuStreamHandle stream, PoolKind kind, uint32_t entry,
                          const unsigned char* from) const {
  return EachPart(kind, [&](CuPointer pool, uint64_t bytes) {
    const Status status =
        machine_->Check(doing, (*machine_)->MemcpyToDevice(pool + entry * bytes, from, bytes, stream));
    from += bytes;
    return status;
  });
}

Status CuMemory::Read(CuStreamHandle stream, PoolKind kind, uint32_t entry, unsigned char* out) const {
  LLMC_RETURN_IF_ERROR(CheckEntry(kind, entry, counts_[kind]));
  return ToHost(TextOf(kind, "Reading a KV block", "Reading states"), stream, kind, entry, out);
}

Status CuMemory::Write(CuStreamHandle stream, PoolKind kind, uint32_t entry, const unsigned char* from) const {
  LLMC_RETURN_IF_ERROR(CheckEntry(kind, entry, counts_[kind]));
  return FromHost(TextOf(kind, "Writing a KV block", "Writing states"), stream, kind, entry, from);
}

Status CuMemory::OpenSwapSpace(const PoolCounts& places) {
  for (const PoolKind kind : kPoolKinds) {
    const uint64_t bytes = places[kind] * entry_bytes_[kind];
    if (bytes > 0) LLMC_RETURN_IF_ERROR(TakePinned(machine_, "swap space", bytes, &swap_[kind]));
  }
  return Status::Ok();
}

Status CuMemory::Save(CuStreamHandle stream, PoolKind kind, uint32_t entry, uint32_t place) const {
  return ToHost(TextOf(kind, "Saving a KV block", "Saving states"), stream, kind, entry, SavedAt(kind, place));
}

Status CuMemory::Load(CuStreamHandle stream, PoolKind kind, uint32_t place, uint32_t entry) const {
  return FromHost(TextOf(kind, "Bringing a KV block back", "Bringing states back"), stream, kind, entry,
                  SavedAt(kind, place));
}

}  // namespace llmc
