#include "device/opencl/cl_memory.h"

namespace llmc {
Status ClMemory::Make(std::shared_ptr<const ClMachine> machine, const Artifact& artifact, const PoolCounts& counts,
                      uint32_t rank, const OffloadOptions& offload, cl_command_queue queue,
                      std::unique_ptr<ClMemory>* out) {
  std::unique_ptr<ClMemory> made(new ClMemory(std::move(machine)));
  made->counts_ = counts;
  made->rank_ = rank;
  made->bytes_ = DeviceMemory::Of(artifact, counts, rank);
  made->offload_ = Offload::Of(artifact, rank, offload);
  made->slots_ = artifact.shape().adapters;
  made->num_slots_ = artifact.shape().adapter_slots;
  DeviceMemory taken = made->bytes_;
  taken.weights -= made->offload_.bytes();
  LLMC_RETURN_IF_ERROR(taken.CheckFits(artifact, made->machine_->name(), made->machine_->memory_bytes()));

  const auto num_layers = static_cast<size_t>(artifact.model().num_layers);
  for (ClState* state : {&made->state_, &made->saved_}) {
    state->keys.resize(num_layers);
    state->values.resize(num_layers);
  }
  for (const PoolKind kind : kPoolKinds) {
    LLMC_RETURN_IF_ERROR(ClState::EachPart(made->bytes_, kind, [&](auto pool, size_t layer, uint64_t bytes) {
      ClBuffer& buffer = (made->state_.*pool)[layer];
      LLMC_RETURN_IF_ERROR(
          made->Allocate(TextOf(kind, "KV pool", "states"), bytes * counts[kind], kClMemReadWrite, &buffer));
      return made->Fill(queue, buffer, bytes * counts[kind]);
    }));
  }
  LLMC_RETURN_IF_ERROR(made->MakeAdapters(queue));
  LLMC_RETURN_IF_ERROR(made->LoadWeights(artifact, queue));
  LLMC_RETURN_IF_CL_ERROR("Filling the memory of '" + made->machine_->name() + "'", (*made->machine_)->Finish(queue));
  *out = std::move(made);
  return Status::Ok();
}

Status ClMemory::MakeWork(const Artifact& artifact, cl_command_queue queue, ClWork* out) const {
  ClWork made;
  const auto take = [this](const char* what, uint64_t bytes, ClBuffer* buffer) {
    return Allocate(what, bytes, kClMemReadWrite, buffer);
  };
  LLMC_RETURN_IF_ERROR(ClWork::Make(DeviceMemory::Of(artifact, counts_, rank_), take, &made));
  LLMC_RETURN_IF_ERROR(ClearArena(queue, made));
  if (made.hidden_bytes > 0) LLMC_RETURN_IF_ERROR(Fill(queue, made.hidden, made.hidden_bytes));
  *out = std::move(made);
  return Status::Ok();
}

Status ClMemory::Allocate(const std::string& what, uint64_t bytes, cl_bitfield flags, ClBuffer* out) const {
  if (bytes > machine_->buffer_bytes()) {
    return Status::Error(LLMC_ERR_OUT_OF_MEMORY, what + " needs a buffer of " + MemorySize(bytes) + " and '" +
                                                     machine_->name() + "' takes at most " +
                                                     MemorySize(machine_->buffer_bytes()) +
                                                     "; make that smaller, or choose another device.");
  }
  cl_int code = kClSuccess;
  cl_mem memory = (*machine_)->CreateBuffer(machine_->context(), flags, bytes, nullptr, &code);
  LLMC_RETURN_IF_CL_ERROR("Taking " + MemorySize(bytes) + " for " + what + " from '" + machine_->name() + "'", code);
  *out = ClBuffer(machine_, memory);
  return Status::Ok();
}

Status ClMemory::Fill(cl_command_queue queue, const ClBuffer& buffer, uint64_t bytes) const {
  const unsigned char zero = 0;
  LLMC_RETURN_IF_CL_ERROR("Clearing memory of '" + machine_->name() + "'",
                          (*machine_)->EnqueueFillBuffer(queue, buffer.get(), &zero, 1, 0, bytes, 0, nullptr, nullptr));
  return Status::Ok();
}

Status ClMemory::LoadWeights(const Artifact& artifact, cl_command_queue queue) {
  // Read rather than mapped: bytes that a truncated file lacks are an error then, not a signal.
  std::vector<unsigned char> host;
  for (const WeightRecord* weight : WeightsOfRank(artifact, rank_)) {
    // Offloaded weights stay on the host: kernels read them over the bus at each use.
    const bool stays = offload_.host_weights()[state_.weights.size()].bytes > 0;
    const cl_bitfield flags = stays ? kClMemReadOnly | kClMemAllocHostPtr : kClMemReadOnly;
    state_.weights.emplace_back();
    if (weight == nullptr) continue;
    LLMC_RETURN_IF_ERROR(Allocate("a weight", weight->bytes, flags, &state_.weights.back()));
    host.resize(weight->bytes);
    LLMC_RETURN_IF_ERROR(artifact.weight_file().Read(weight->file_offset, weight->bytes, host.data()));
    LLMC_RETURN_IF_CL_ERROR("Copying weights to '" + machine_->name() + "'",
                            (*machine_)->EnqueueWriteBuffer(queue, state_.weights.back().get(), kClTrue, 0,
                                                            weight->bytes, host.data(), 0, nullptr, nullptr));
  }
  return Status::Ok();
}

// Clears all slots: rank 0 means no adapter.
Status ClMemory::MakeAdapters(cl_command_queue queue) {
  for (const AdapterSlot& slot : slots_) {
    const uint64_t bytes = slot.bytes() * num_slots_;
    state_.adapters.emplace_back();
    LLMC_RETURN_IF_ERROR(Allocate("slots of adapters", bytes, kClMemReadOnly, &state_.adapters.back()));
    LLMC_RETURN_IF_ERROR(Fill(queue, state_.adapters.back(), bytes));
  }
  return Status::Ok();
}

Status ClMemory::LoadAdapter(cl_command_queue queue, uint32_t slot, const std::vector<AdapterMatrix>& matrices) const {
  constexpr const char* kDoing = "Copying an adapter";
  std::vector<std::vector<char>> host(slots_.size());
  cl_int code = kClSuccess;
  for (uint32_t linear = 0; linear < slots_.size() && code == kClSuccess; ++linear) {
    const uint64_t bytes = slots_[linear].bytes();
    host[linear].resize(bytes);
    PackAdapter(slots_[linear], linear, matrices, host[linear].data());
    code = (*machine_)->EnqueueWriteBuffer(queue, state_.adapters[linear].get(), kClFalse, slot * bytes, bytes,
                                           host[linear].data(), 0, nullptr, nullptr);
  }
  // Behind an error, too: copies before it read the host's memory.
  Status waited = machine_->AwaitQueued(queue, kDoing);
  LLMC_RETURN_IF_CL_ERROR(kDoing + (" on '" + machine_->name() + "'"), code);
  return waited;
}

ClPlace ClMemory::PlaceOf(const OperandRecord& operand, const StepLayout& inputs, const ClWork& work) const {
  const auto place = PlaceOfOperand<cl_mem>(operand, inputs, state_, work);
  return {place.memory, static_cast<cl_int>(place.offset / kAlignment)};
}

Status ClMemory::Copy(cl_command_queue queue, PoolKind kind, uint32_t from, uint32_t to) const {
  LLMC_RETURN_IF_ERROR(CheckCopy(kind, from, to, counts_[kind]));
  if (from == to) return Status::Ok();
  return CopyBetween(queue, kind, state_, from, state_, to);
}

Status ClMemory::CopyBetween(cl_command_queue queue, PoolKind kind, const ClState& from, uint32_t from_entry,
                             const ClState& to, uint32_t to_entry) const {
  return ClState::EachPart(bytes_, kind, [&](auto pool, size_t layer, uint64_t bytes) {
    LLMC_RETURN_IF_CL_ERROR(
        TextOf(kind, "Copying a KV block", "Copying states") + (" on '" + machine_->name() + "'"),
        (*machine_)->EnqueueCopyBuffer(queue, (from.*pool)[layer].get(), (to.*pool)[layer].get(), from_entry * bytes,
                                       to_entry * bytes, bytes, 0, nullptr, nullptr));
    return Status::Ok();
  });
}

Status ClMemory::Read(cl_command_queue queue, PoolKind kind, uint32_t entry, unsigned char* out) const {
  return Pass(queue, kind, entry, TextOf(kind, "Reading a KV block", "Reading states"),
              [&](cl_mem pool, uint64_t from, uint64_t bytes) {
                const cl_int code =
                    (*machine_)->EnqueueReadBuffer(queue, pool, kClFalse, from, bytes, out, 0, nullptr, nullptr);
                out += bytes;
                return code;
              });
}

Status ClMemory::Write(cl_command_queue queue, PoolKind kind, uint32_t entry, const unsigned char* from) const {
  return Pass(queue, kind, entry, TextOf(kind, "Writing a KV block", "Writing states"),
              [&](cl_mem pool, uint64_t to, uint64_t bytes) {
                const cl_int code =
                    (*machine_)->EnqueueWriteBuffer(queue, pool, kClFalse, to, bytes, from, 0, nullptr, nullptr);
                from += bytes;
                return code;
              });
}

// Enqueues the copies of all layers, then waits once. So it does behind an error: copies before it use the caller's
// memory.
template <class Enqueue>
Status ClMemory::Pass(cl_command_queue queue, PoolKind kind, uint32_t entry, const char* doing, Enqueue enqueue) const {
  LLMC_RETURN_IF_ERROR(CheckEntry(kind, entry, counts_[kind]));
  const std::string name = doing + (" of '" + machine_->name() + "'");
  const Status status = ClState::EachPart(bytes_, kind, [&](auto pool, size_t layer, uint64_t bytes) {
    LLMC_RETURN_IF_CL_ERROR(name, enqueue((state_.*pool)[layer].get(), entry * bytes, bytes));
    return Status::Ok();
  });
  const cl_int waited = (*machine_)->Finish(queue);
  LLMC_RETURN_IF_ERROR(status);
  LLMC_RETURN_IF_CL_ERROR(name, waited);
  return Status::Ok();
}

Status ClMemory::OpenSwapSpace(const PoolCounts& places) {
  for (const PoolKind kind : kPoolKinds) {
    if (places[kind] == 0) continue;
    LLMC_RETURN_IF_ERROR(ClState::EachPart(bytes_, kind, [&](auto pool, size_t layer, uint64_t bytes) {
      return Allocate("swap space", bytes * places[kind], kClMemReadWrite | kClMemAllocHostPtr, &(saved_.*pool)[layer]);
    }));
  }
  return Status::Ok();
}

Status ClMemory::Save(cl_command_queue queue, PoolKind kind, uint32_t entry, uint32_t place) const {
  return CopyBetween(queue, kind, state_, entry, saved_, place);
}

Status ClMemory::Load(cl_command_queue queue, PoolKind kind, uint32_t place, uint32_t entry) const {
  return CopyBetween(queue, kind, saved_, place, state_, entry);
}

}  // namespace llmc
