// GraphState, GraphWork: the memories that operands of commands lie in. Buffer: an owner of memory of the device; a
// kind of device may put several weights or layers into one, and then has addresses instead.
#pragma once
#include <cstdint>
#include <vector>

#include "artifact/artifact.h"
#include "core/status.h"
#include "device/gpu/device_memory.h"
#include "device/gpu/owned.h"
#include "device/gpu/step_inputs.h"

namespace llmc {

// What outlives a step: [weight], [layer], [layer], [linear with a pool].
template <class Buffer>
struct GraphState {
  std::vector<Buffer> weights, keys, values, adapters;

  // Calls visit(member, layer, bytes) for each part of a KV block, or of a slot: layer after layer, keys before values.
  // Values that are part of keys have none.
  template <class Visit>
  static Status EachPart(const DeviceMemory& sizes, PoolKind kind, Visit visit) {
    for (size_t i = 0; i < sizes.layers.size(); ++i) {
      const auto& [of, bytes] = sizes.layers[i];
      if (of != kind) continue;
      const size_t layer = sizes.first_layer + i;
      LLMC_RETURN_IF_ERROR(visit(&GraphState::keys, layer, bytes.key_block_bytes));
      if (bytes.value_block_bytes != 0)
        LLMC_RETURN_IF_ERROR(visit(&GraphState::values, layer, bytes.value_block_bytes));
    }
    return Status::Ok();
  }
};

// Working memory of graphs, without state; sized for the largest graph of an artifact.
template <class Buffer>
struct GraphWork {
  Buffer arena, step, logits, hidden;
  uint64_t arena_bytes = 0, step_bytes = 0, logit_bytes = 0;
  uint64_t hidden_bytes = 0;  // 0: the model has no hidden states

  // take(what, bytes, buffer) allocates.
  template <class Take>
  static Status Make(const DeviceMemory& sizes, Take take, GraphWork* out) {
    out->arena_bytes = sizes.arena;
    out->step_bytes = sizes.step;
    out->logit_bytes = sizes.logits;
    LLMC_RETURN_IF_ERROR(take("the arena", sizes.arena, &out->arena));
    LLMC_RETURN_IF_ERROR(take("inputs", sizes.step, &out->step));
    out->hidden_bytes = sizes.hidden;
    if (sizes.hidden > 0) LLMC_RETURN_IF_ERROR(take("hidden states", sizes.hidden, &out->hidden));
    return take("logits", sizes.logits, &out->logits);
  }
};

// A byte of a memory.
template <class Handle>
struct GpuPlace {
  Handle memory;
  uint64_t offset;
};

template <class Machine, class Handle, class Free>
Handle HandleOf(const Owned<Machine, Handle, Free>& owner) {
  return owner.get();
}
inline uint64_t HandleOf(uint64_t address) { return address; }

// Where an operand of a command begins. inputs: of the command's graph.
template <class Handle, class State, class Work>
GpuPlace<Handle> PlaceOfOperand(const OperandRecord& operand, const StepLayout& inputs, const GraphState<State>& state,
                                const GraphWork<Work>& work) {
  switch (static_cast<OperandKind>(operand.kind)) {
    case OperandKind::kArena: return {HandleOf(work.arena), operand.offset};
    case OperandKind::kWeight: return {HandleOf(state.weights[operand.index]), operand.offset};
    case OperandKind::kInput: return {HandleOf(work.step), inputs.offsets[operand.index] + operand.offset};
    case OperandKind::kKeyPool: return {HandleOf(state.keys[operand.index]), 0};
    case OperandKind::kValuePool: return {HandleOf(state.values[operand.index]), 0};
    case OperandKind::kOutput: return {HandleOf(work.logits), operand.offset};
    case OperandKind::kAdapters: return {HandleOf(state.adapters[operand.index]), 0};
    case OperandKind::kStates: return {HandleOf(work.hidden), operand.offset};
  }
  return {};
}

}  // namespace llmc
