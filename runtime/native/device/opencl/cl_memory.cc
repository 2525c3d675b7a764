#include "device/opencl/cl_memory.h"

namespace llmc {

Status ClMemory::Make(std::shared_ptr<const ClMachine> machine, const Artifact& artifact, uint32_t num_blocks,
                      cl_command_queue queue, std::unique_ptr<ClMemory>* out) {
  std::unique_ptr<ClMemory> made(new ClMemory(std::move(machine)));
  made->num_blocks_ = num_blocks;
  const DeviceMemory bytes = made->bytes_ = DeviceMemory::Of(artifact, num_blocks);
  LLMC_RETURN_IF_ERROR(bytes.CheckFits(artifact, made->machine_->name(), made->machine_->memory_bytes()));

  LLMC_RETURN_IF_ERROR(made->Allocate("arena", bytes.arena, false, &made->arena_));
  LLMC_RETURN_IF_ERROR(made->Allocate("inputs", bytes.step, true, &made->step_));
  LLMC_RETURN_IF_ERROR(made->Allocate("logits", bytes.logits, false, &made->logits_));
  LLMC_RETURN_IF_ERROR(made->ClearArena(queue));
  for (int32_t layer = 0; layer < artifact.model().num_layers; ++layer) {
    for (auto* pool : {&made->keys_, &made->values_}) {
      const uint64_t pool_bytes = (pool == &made->keys_ ? bytes.key_block : bytes.value_block) * num_blocks;
      pool->emplace_back();
      if (pool_bytes == 0) continue;  // values that are a part of keys
      LLMC_RETURN_IF_ERROR(made->Allocate("KV pool", pool_bytes, false, &pool->back()));
      LLMC_RETURN_IF_ERROR(made->Fill(queue, pool->back(), pool_bytes));
    }
  }
  LLMC_RETURN_IF_ERROR(made->LoadWeights(artifact, queue));
  LLMC_RETURN_IF_CL_ERROR("Filling the memory of '" + made->machine_->name() + "'", (*made->machine_)->Finish(queue));
  *out = std::move(made);
  return Status::Ok();
}

Status ClMemory::Allocate(const std::string& what, uint64_t bytes, bool read_only, ClBuffer* out) const {
  if (bytes > machine_->buffer_bytes()) {
    return Status::Error(LLMC_ERR_OUT_OF_MEMORY, what + " needs a buffer of " + MemorySize(bytes) + " and '" +
                                                     machine_->name() + "' takes at most " +
                                                     MemorySize(machine_->buffer_bytes()) +
                                                     "; ask for a smaller KV pool, smaller buckets, or another device");
  }
  cl_int code = kClSuccess;
  cl_mem memory = (*machine_)->CreateBuffer(machine_->context(), read_only ? kClMemReadOnly : kClMemReadWrite, bytes,
                                            nullptr, &code);
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

Status ClMemory::ClearArena(cl_command_queue queue) const { return Fill(queue, arena_, bytes_.arena); }

Status ClMemory::LoadWeights(const Artifact& artifact, cl_command_queue queue) {
  // What a truncated file lacks is an error of Read, and a signal of its mapping.
  std::vector<unsigned char> host;
  for (const WeightRecord& weight : artifact.weights()) {
    weights_.emplace_back();
    LLMC_RETURN_IF_ERROR(Allocate("a weight", weight.bytes, true, &weights_.back()));
    host.resize(weight.bytes);
    LLMC_RETURN_IF_ERROR(artifact.weight_file().Read(weight.file_offset, weight.bytes, host.data()));
    LLMC_RETURN_IF_CL_ERROR("Copying weights to '" + machine_->name() + "'",
                            (*machine_)->EnqueueWriteBuffer(queue, weights_.back().get(), kClTrue, 0, weight.bytes,
                                                            host.data(), 0, nullptr, nullptr));
  }
  return Status::Ok();
}

ClPlace ClMemory::PlaceOf(const OperandRecord& operand, const StepLayout& inputs) const {
  const auto at = [](uint64_t bytes) { return static_cast<cl_int>(bytes / kAlignment); };
  switch (static_cast<OperandKind>(operand.kind)) {
    case OperandKind::kArena: return {arena_.get(), at(operand.offset)};
    case OperandKind::kWeight: return {weights_[operand.index].get(), at(operand.offset)};
    case OperandKind::kInput: return {step_.get(), at(inputs.offsets[operand.index] + operand.offset)};
    case OperandKind::kKeyPool: return {keys_[operand.index].get(), 0};
    case OperandKind::kValuePool: return {values_[operand.index].get(), 0};
    case OperandKind::kOutput: return {logits_.get(), at(operand.offset)};
    case OperandKind::kAdapters: break;  // refused when the artifact was opened
  }
  return {nullptr, 0};
}

Status ClMemory::CopyBlock(cl_command_queue queue, uint32_t from, uint32_t to) const {
  LLMC_RETURN_IF_ERROR(CheckCopy(from, to, num_blocks_));
  if (from == to) return Status::Ok();
  for (const auto* pool : {&keys_, &values_}) {
    const uint64_t bytes = pool == &keys_ ? bytes_.key_block : bytes_.value_block;
    if (bytes == 0) continue;
    for (const ClBuffer& layer : *pool) {
      LLMC_RETURN_IF_CL_ERROR("Copying a KV block on '" + machine_->name() + "'",
                              (*machine_)->EnqueueCopyBuffer(queue, layer.get(), layer.get(), from * bytes, to * bytes,
                                                             bytes, 0, nullptr, nullptr));
    }
  }
  return Status::Ok();
}

}  // namespace llmc
