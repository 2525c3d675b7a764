#include "device/batch.h"

#include <algorithm>
#include <string>

namespace llmc {
namespace {

Status OutOfRange(const char* what, uint64_t index, int64_t value, int64_t low, int64_t high) {
  return Status::Error(LLMC_ERR_OUT_OF_RANGE, std::string(what) + "[" + std::to_string(index) + "] is " +
                                                  std::to_string(value) + ", outside " + std::to_string(low) + " … " +
                                                  std::to_string(high) + "; pass values of this model and graph");
}

Status CheckRange(const char* what, const int32_t* values, uint64_t count, int64_t low, int64_t high) {
  for (uint64_t i = 0; i < count; ++i) {
    if (values[i] < low || values[i] > high) return OutOfRange(what, i, values[i], low, high);
  }
  return Status::Ok();
}

Status CheckCount(const char* what, uint32_t value, uint32_t low, uint32_t high) {
  if (value >= low && value <= high) return Status::Ok();
  return Status::Error(LLMC_ERR_OUT_OF_RANGE, std::string(what) + " is " + std::to_string(value) + ", outside " +
                                                  std::to_string(low) + " … " + std::to_string(high) +
                                                  "; choose a graph that fits the batch");
}

// A slot that two sequences of a step write to would have the state of either.
Status CheckStateSlots(const ModelShape& model, uint32_t num_states, const BatchView& b) {
  if (model.recurrent() != (b.state_slots != nullptr)) {
    return Status::Error(LLMC_ERR_INVALID_ARGUMENT,
                         model.recurrent()
                             ? "state_slots is missing and layers of this model have a state; give each "
                               "sequence a slot"
                             : "state_slots is given and no layer of this model has a state; leave it out");
  }
  if (b.state_slots == nullptr) return Status::Ok();
  std::vector<int32_t> written;
  written.reserve(2 * uint64_t{b.num_seqs});
  for (uint32_t i = 0; i < b.num_seqs; ++i) {
    const uint64_t at = uint64_t{i} * kStateFields;
    const int32_t slot = b.state_slots[at], keep_tokens = b.state_slots[at + 1], keep_slot = b.state_slots[at + 2];
    const int64_t last = int64_t{num_states} - 1;
    if (slot < 0 || slot > last) return OutOfRange("state_slots", at, slot, 0, last);
    if (keep_tokens < 0 || keep_tokens > model.max_model_len) {
      return OutOfRange("state_slots", at + 1, keep_tokens, 0, model.max_model_len);
    }
    if (keep_slot < 0 || keep_slot > last) return OutOfRange("state_slots", at + 2, keep_slot, 0, last);
    if (slot != 0) written.push_back(slot);
    if (keep_tokens != 0 && keep_slot != 0) written.push_back(keep_slot);
  }
  std::sort(written.begin(), written.end());
  const auto twice = std::adjacent_find(written.begin(), written.end());
  if (twice == written.end()) return Status::Ok();
  return Status::Error(LLMC_ERR_OUT_OF_RANGE, "state_slots has slot " + std::to_string(*twice) +
                                                  " twice among slots and keep slots; give each sequence slots of its "
                                                  "own");
}

Status CheckRopePositions(const ModelShape& model, const BatchView& b) {
  if (b.rope_positions == nullptr) return Status::Ok();
  if (model.rope_axes == 0) {
    return Status::Error(LLMC_ERR_INVALID_ARGUMENT,
                         "rope_positions is given and this model's rotary positions are its positions; leave it out");
  }
  return CheckRange("rope_positions", b.rope_positions, uint64_t{b.num_tokens} * kRopeAxes, 0, model.max_model_len - 1);
}

}  // namespace

uint32_t FillBlockTables(const ModelShape& model, const BatchView& b, int32_t* block_tables, int32_t* token_seq) {
  const GraphShape& graph = model.graphs[b.graph];
  const bool flat = graph.max_blocks != 0;
  const uint32_t stride = flat ? 1 : std::min(b.block_table_stride, graph.max_blocks_per_seq);
  const auto block_size = static_cast<uint32_t>(model.block_size);
  uint32_t end = 0;  // end of the blocks written so far
  for (uint32_t i = 0; i < b.num_seqs; ++i) {
    const uint32_t begin = end;
    const uint32_t used = (static_cast<uint32_t>(b.context_lens[i]) + block_size - 1) / block_size;
    const uint32_t count = flat ? used : stride;
    std::copy_n(b.block_tables + uint64_t{i} * b.block_table_stride, count, block_tables + begin);
    std::fill(token_seq + b.query_start[i], token_seq + b.query_start[i + 1], static_cast<int32_t>(flat ? begin : i));
    end += count;
  }
  return stride;
}

void FillRopePositions(const BatchView& b, int32_t* out) {
  if (b.rope_positions != nullptr) {
    std::copy_n(b.rope_positions, uint64_t{kRopeAxes} * b.num_tokens, out);
    return;
  }
  for (uint32_t i = 0; i < b.num_tokens; ++i, out += kRopeAxes) std::fill_n(out, kRopeAxes, b.positions[i]);
}

Status CheckCounts(const ModelShape& model, uint32_t graph, uint32_t num_tokens, uint32_t num_seqs,
                   uint32_t num_samples, uint32_t block_table_stride) {
  if (graph >= model.graphs.size()) {
    return Status::Error(
        LLMC_ERR_OUT_OF_RANGE,
        "graph " + std::to_string(graph) + " does not exist; the artifact has " + std::to_string(model.graphs.size()));
  }
  const GraphShape& g = model.graphs[graph];
  LLMC_RETURN_IF_ERROR(CheckCount("num_tokens", num_tokens, 1, g.max_tokens));
  LLMC_RETURN_IF_ERROR(CheckCount("num_seqs", num_seqs, 1, g.max_seqs));
  LLMC_RETURN_IF_ERROR(CheckCount("num_samples", num_samples, 0, g.max_samples));
  return CheckCount("block_table_stride", block_table_stride, 1, INT32_MAX);
}

Status CheckSizes(const StepBatch& b) {
  const struct {
    const char* name;
    const std::vector<int32_t>& values;
    uint64_t needed;
  } arrays[] = {
      {"input_ids", b.input_ids, b.num_tokens},
      {"positions", b.positions, b.num_tokens},
      {"slot_mapping", b.slot_mapping, b.num_tokens},
      {"block_tables", b.block_tables, uint64_t{b.num_seqs} * b.block_table_stride},
      {"context_lens", b.context_lens, b.num_seqs},
      {"query_start", b.query_start, uint64_t{b.num_seqs} + 1},
      {"sample_index", b.sample_index, b.num_samples},
      {"adapter_slots", b.adapter_slots, b.adapter_slots.empty() ? 0 : uint64_t{b.num_seqs}},
      {"state_slots", b.state_slots, b.state_slots.empty() ? 0 : uint64_t{b.num_seqs} * kStateFields},
      {"rope_positions", b.rope_positions, b.rope_positions.empty() ? 0 : uint64_t{b.num_tokens} * kRopeAxes},
  };
  for (const auto& array : arrays) {
    if (array.values.size() < array.needed) {
      return Status::Error(LLMC_ERR_INVALID_ARGUMENT, std::string(array.name) + " has " +
                                                          std::to_string(array.values.size()) + " elements and needs " +
                                                          std::to_string(array.needed) + "; fill it before the step");
    }
  }
  return Status::Ok();
}

Status CheckBatch(const ModelShape& model, uint32_t num_blocks, uint32_t num_states, const BatchView& b) {
  LLMC_RETURN_IF_ERROR(CheckCounts(model, b.graph, b.num_tokens, b.num_seqs, b.num_samples, b.block_table_stride));
  const GraphShape& graph = model.graphs[b.graph];
  const int64_t block_size = model.block_size;
  const int64_t max_slot = int64_t{num_blocks} * block_size - 1;
  const int64_t lowest = model.places_rows ? kPlacedRow : 0;
  LLMC_RETURN_IF_ERROR(CheckRange("input_ids", b.input_ids, b.num_tokens, lowest, model.vocab_size - 1));
  LLMC_RETURN_IF_ERROR(CheckRange("positions", b.positions, b.num_tokens, 0, model.max_model_len - 1));
  LLMC_RETURN_IF_ERROR(CheckRange("slot_mapping", b.slot_mapping, b.num_tokens, 0, max_slot));
  LLMC_RETURN_IF_ERROR(CheckRange("sample_index", b.sample_index, b.num_samples, 0, int64_t{b.num_tokens} - 1));
  if (b.adapter_slots != nullptr) {
    LLMC_RETURN_IF_ERROR(
        CheckRange("adapter_slots", b.adapter_slots, b.num_seqs, kNoAdapter, int64_t{model.adapter_slots} - 1));
  }
  if (b.query_start[0] != 0) return OutOfRange("query_start", 0, b.query_start[0], 0, 0);
  if (b.query_start[b.num_seqs] != static_cast<int64_t>(b.num_tokens)) {
    return OutOfRange("query_start", b.num_seqs, b.query_start[b.num_seqs], b.num_tokens, b.num_tokens);
  }
  const int64_t columns = std::min(b.block_table_stride, graph.max_blocks_per_seq);
  uint64_t num_used = 0;
  for (uint32_t i = 0; i < b.num_seqs; ++i) {
    const int64_t start = b.query_start[i], end = b.query_start[i + 1];
    if (end <= start || end > static_cast<int64_t>(b.num_tokens)) {
      return OutOfRange("query_start", i + 1, end, start + 1, b.num_tokens);
    }
    const int64_t context = b.context_lens[i];
    if (context < end - start || context > columns * block_size) {
      return OutOfRange("context_lens", i, context, end - start, columns * block_size);
    }
    // Attention reads keys 0 … position: with the position inside the context, these are in the checked blocks.
    LLMC_RETURN_IF_ERROR(CheckRange("positions", b.positions + start, end - start, 0, context - 1));
    const int32_t* row = b.block_tables + uint64_t{i} * b.block_table_stride;
    const uint64_t used = static_cast<uint64_t>((context + block_size - 1) / block_size);
    num_used += used;
    if (graph.max_blocks != 0 && num_used > graph.max_blocks) {
      return Status::Error(LLMC_ERR_OUT_OF_RANGE, "context_lens[0 … " + std::to_string(i) + "] fill " +
                                                      std::to_string(num_used) + " blocks, the graph holds " +
                                                      std::to_string(graph.max_blocks) +
                                                      " in all; choose a graph that fits the batch");
    }
    LLMC_RETURN_IF_ERROR(CheckRange("block_tables", row, used, 0, int64_t{num_blocks} - 1));
  }
  LLMC_RETURN_IF_ERROR(CheckRopePositions(model, b));
  return CheckStateSlots(model, num_states, b);
}

}  // namespace llmc
