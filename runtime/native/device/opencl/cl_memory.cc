#include "device/opencl/cl_memory.h"

#include <algorithm>

namespace llmc {
namespace {

constexpr uint64_t kScalarBytes = kAlignment;  // 8 of int32, and nothing behind them

std::string Bytes(uint64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

}  // namespace

ClInputs ClInputs::Of(const GraphRecord& graph) {
  ClInputs inputs;
  inputs.bytes = kScalarBytes;
  for (uint32_t i = 0; i < kNumInputs; ++i) {
    inputs.offsets[i] = inputs.bytes;
    inputs.bytes += InputBytes(graph, i);
  }
  return inputs;
}

Status ClMemory::Make(std::shared_ptr<const ClMachine> machine, const Artifact& artifact, uint32_t num_blocks,
                      cl_command_queue queue, std::unique_ptr<ClMemory>* out) {
  std::unique_ptr<ClMemory> made(new ClMemory(std::move(machine)));
  made->num_blocks_ = num_blocks;
  made->key_block_bytes_ = artifact.key_block_bytes();
  made->value_block_bytes_ = artifact.value_block_bytes();
  made->arena_bytes_ = std::max<uint64_t>(artifact.max_arena_bytes(), kAlignment);
  uint64_t max_samples = 1;
  for (const GraphRecord& graph : artifact.graphs()) {
    made->step_bytes_ = std::max(made->step_bytes_, ClInputs::Of(graph).bytes);
    max_samples = std::max<uint64_t>(max_samples, graph.max_samples);
  }
  made->logit_bytes_ = RoundUp(max_samples * artifact.shape().output_width() * sizeof(float), kAlignment);
  for (const WeightRecord& weight : artifact.weights()) made->weight_bytes_ += weight.bytes;
  const auto num_layers = static_cast<uint64_t>(artifact.model().num_layers);
  made->pool_bytes_ = (made->key_block_bytes_ + made->value_block_bytes_) * num_blocks * num_layers;
  LLMC_RETURN_IF_ERROR(made->CheckFits(artifact));

  LLMC_RETURN_IF_ERROR(made->Allocate("arena", made->arena_bytes_, false, &made->arena_));
  LLMC_RETURN_IF_ERROR(made->Allocate("inputs", made->step_bytes_, true, &made->step_));
  LLMC_RETURN_IF_ERROR(made->Allocate("logits", made->logit_bytes_, false, &made->logits_));
  LLMC_RETURN_IF_ERROR(made->ClearArena(queue));
  for (uint64_t layer = 0; layer < num_layers; ++layer) {
    for (auto* pool : {&made->keys_, &made->values_}) {
      const uint64_t bytes = (pool == &made->keys_ ? made->key_block_bytes_ : made->value_block_bytes_) * num_blocks;
      pool->emplace_back();
      if (bytes == 0) continue;  // values that are a part of keys
      LLMC_RETURN_IF_ERROR(made->Allocate("KV pool", bytes, false, &pool->back()));
      LLMC_RETURN_IF_ERROR(made->Fill(queue, pool->back(), bytes));
    }
  }
  LLMC_RETURN_IF_ERROR(made->LoadWeights(artifact, queue));
  LLMC_RETURN_IF_CL_ERROR("Filling the memory of '" + made->machine_->name() + "'", (*made->machine_)->Finish(queue));
  *out = std::move(made);
  return Status::Ok();
}

Status ClMemory::CheckFits(const Artifact& artifact) const {
  const uint64_t needed = weight_bytes_ + pool_bytes_ + arena_bytes_ + step_bytes_ + logit_bytes_;
  if (needed > machine_->memory_bytes()) {
    return Status::Error(LLMC_ERR_OUT_OF_MEMORY, "the artifact '" + artifact.directory() + "' needs " + Bytes(needed) +
                                                     " (weights " + Bytes(weight_bytes_) + ", KV pool " +
                                                     Bytes(pool_bytes_) + ", arena " + Bytes(arena_bytes_) + ") and '" +
                                                     machine_->name() + "' has " + Bytes(machine_->memory_bytes()) +
                                                     "; ask for a smaller KV pool, or choose another device");
  }
  return Status::Ok();
}

Status ClMemory::Allocate(const std::string& what, uint64_t bytes, bool read_only, ClBuffer* out) const {
  if (bytes > machine_->buffer_bytes()) {
    return Status::Error(LLMC_ERR_OUT_OF_MEMORY, what + " needs a buffer of " + Bytes(bytes) + " and '" +
                                                     machine_->name() + "' takes at most " +
                                                     Bytes(machine_->buffer_bytes()) +
                                                     "; ask for a smaller KV pool, smaller buckets, or another device");
  }
  cl_int code = kClSuccess;
  cl_mem memory = (*machine_)->CreateBuffer(machine_->context(), read_only ? kClMemReadOnly : kClMemReadWrite, bytes,
                                            nullptr, &code);
  LLMC_RETURN_IF_CL_ERROR("Taking " + Bytes(bytes) + " for " + what + " from '" + machine_->name() + "'", code);
  *out = ClBuffer(machine_, memory);
  return Status::Ok();
}

Status ClMemory::Fill(cl_command_queue queue, const ClBuffer& buffer, uint64_t bytes) const {
  const unsigned char zero = 0;
  LLMC_RETURN_IF_CL_ERROR("Clearing memory of '" + machine_->name() + "'",
                          (*machine_)->EnqueueFillBuffer(queue, buffer.get(), &zero, 1, 0, bytes, 0, nullptr, nullptr));
  return Status::Ok();
}

Status ClMemory::ClearArena(cl_command_queue queue) const { return Fill(queue, arena_, arena_bytes_); }

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

ClPlace ClMemory::PlaceOf(const OperandRecord& operand, const ClInputs& inputs) const {
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
  if (from >= num_blocks_ || to >= num_blocks_) {
    return Status::Error(LLMC_ERR_OUT_OF_RANGE, "cannot copy KV block " + std::to_string(from) + " to " +
                                                    std::to_string(to) + "; the pool has " +
                                                    std::to_string(num_blocks_) + " blocks");
  }
  if (from == to) return Status::Ok();
  for (const auto* pool : {&keys_, &values_}) {
    const uint64_t bytes = pool == &keys_ ? key_block_bytes_ : value_block_bytes_;
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
