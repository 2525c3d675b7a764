#include "device/cuda/cu_memory.h"

#include <algorithm>
#include <string>
#include <utility>

#include "device/cuda/cu_staging.h"

namespace llmc {

Status CuMemory::Make(CuMachinePtr machine, const Artifact& artifact, uint32_t num_blocks, CuStreamHandle stream,
                      std::unique_ptr<CuMemory>* out) {
  std::unique_ptr<CuMemory> made(new CuMemory(std::move(machine)));
  const CuMachinePtr& cuda = made->machine_;
  made->num_blocks_ = num_blocks;
  const DeviceMemory bytes = made->bytes_ = DeviceMemory::Of(artifact, num_blocks);
  LLMC_RETURN_IF_ERROR(made->CheckRoom(artifact));
  const CuDrain drain(*cuda, stream);
  LLMC_RETURN_IF_ERROR(TakeMemory(cuda, "the arena", bytes.arena, &made->arena_));
  LLMC_RETURN_IF_ERROR(TakeMemory(cuda, "inputs", bytes.step, &made->step_));
  LLMC_RETURN_IF_ERROR(TakeMemory(cuda, "logits", bytes.logits, &made->logits_));
  LLMC_RETURN_IF_ERROR(made->ClearArena(stream));
  if (bytes.pool > 0) {
    LLMC_RETURN_IF_ERROR(TakeMemory(cuda, "the KV pool", bytes.pool, &made->pool_));
    LLMC_RETURN_IF_ERROR(
        cuda->Check("Clearing the KV pool", (*cuda)->Memset(made->pool_.get(), 0, bytes.pool, stream)));
  }
  CuPointer at = made->pool_.get();
  for (int32_t layer = 0; layer < artifact.model().num_layers; ++layer) {
    for (auto* pool : {&made->key_at_, &made->value_at_}) {
      pool->push_back(at);
      at += (pool == &made->key_at_ ? bytes.key_block : bytes.value_block) * num_blocks;
    }
  }
  LLMC_RETURN_IF_ERROR(made->LoadWeights(artifact));
  LLMC_RETURN_IF_ERROR(cuda->Check("Filling the GPU's memory", (*cuda)->StreamSynchronize(stream)));
  *out = std::move(made);
  return Status::Ok();
}

Status CuMemory::CheckRoom(const Artifact& artifact) const {
  LLMC_RETURN_IF_ERROR(bytes_.CheckFits(artifact, machine_->name(), machine_->memory_bytes()));
  uint64_t free = 0;
  LLMC_RETURN_IF_ERROR(machine_->FreeBytes(&free));
  return bytes_.CheckFits(artifact, machine_->name(), free, "free");
}

// As they lie in the file, so that they are one copy.
Status CuMemory::LoadWeights(const Artifact& artifact) {
  uint64_t begin = UINT64_MAX, end = 0;
  for (const WeightRecord& weight : artifact.weights()) {
    begin = std::min(begin, weight.file_offset);
    end = std::max(end, weight.file_offset + weight.bytes);
  }
  if (begin >= end) return Status::Ok();
  LLMC_RETURN_IF_ERROR(TakeMemory(machine_, "weights", end - begin, &weights_));
  for (const WeightRecord& weight : artifact.weights()) {
    weight_at_.push_back(weights_.get() + (weight.file_offset - begin));
  }
  return CopyFileToDevice(machine_, artifact.weight_file(), begin, end - begin, weights_.get());
}

Status CuMemory::ClearArena(CuStreamHandle stream) const {
  return machine_->Check("Clearing the arena", (*machine_)->Memset(arena_.get(), 0, bytes_.arena, stream));
}

CuPointer CuMemory::PlaceOf(const OperandRecord& operand, const StepLayout& inputs) const {
  switch (static_cast<OperandKind>(operand.kind)) {
    case OperandKind::kArena: return arena_.get() + operand.offset;
    case OperandKind::kWeight: return weight_at_[operand.index] + operand.offset;
    case OperandKind::kInput: return step_.get() + inputs.offsets[operand.index] + operand.offset;
    case OperandKind::kKeyPool: return key_at_[operand.index];
    case OperandKind::kValuePool: return value_at_[operand.index];
    case OperandKind::kOutput: return logits_.get() + operand.offset;
    case OperandKind::kAdapters:
    case OperandKind::kStates: break;  // refused when the artifact was opened
  }
  return 0;
}

Status CuMemory::CopyBlock(CuStreamHandle stream, uint32_t from, uint32_t to) const {
  LLMC_RETURN_IF_ERROR(CheckCopy(from, to, num_blocks_));
  if (from == to) return Status::Ok();
  for (const auto* pool : {&key_at_, &value_at_}) {
    const uint64_t bytes = pool == &key_at_ ? bytes_.key_block : bytes_.value_block;
    if (bytes == 0) continue;  // values that are a part of keys
    for (const CuPointer layer : *pool) {
      LLMC_RETURN_IF_ERROR(machine_->Check(
          "Copying a KV block", (*machine_)->MemcpyOnDevice(layer + to * bytes, layer + from * bytes, bytes, stream)));
    }
  }
  return Status::Ok();
}

}  // namespace llmc
