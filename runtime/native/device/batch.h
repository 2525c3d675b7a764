// The inputs of a step, and checks that they fit a graph; common to all devices.
#pragma once
#include <cstdint>
#include <vector>

#include "artifact/model_shape.h"
#include "core/status.h"

namespace llmc {

constexpr int32_t kNoAdapter = -1;

// int32 arrays packed (ragged) at the front, as FORMAT.md describes. Vectors are reused.
struct StepBatch {
  uint32_t graph = 0;
  uint32_t num_tokens = 0, num_seqs = 0, num_samples = 0, block_table_stride = 0;
  std::vector<int32_t> input_ids, positions, slot_mapping, block_tables, context_lens, query_start, sample_index;
  // Adapter slot of each sequence, kNoAdapter for none; empty: no sequence has one.
  std::vector<int32_t> adapter_slots{};
  // Of a recurrent model, kStateFields for each sequence: the slot of its states; a number of tokens, behind which they
  // are also written to another slot, or 0; that slot. Else empty.
  std::vector<int32_t> state_slots{};
  // Of a model with rope_axes, so many for each token; empty: its position on each axis.
  std::vector<int32_t> rope_positions{};
};

// A StepBatch as plain pointers, so that callers can keep their own storage.
struct BatchView {
  uint32_t graph, num_tokens, num_seqs, num_samples, block_table_stride;
  const int32_t *input_ids, *positions, *slot_mapping, *block_tables, *context_lens, *query_start, *sample_index;
  const int32_t* adapter_slots = nullptr;  // NULL: no sequence has an adapter
  const int32_t* state_slots = nullptr;  // NULL: the model is not recurrent
  const int32_t* rope_positions = nullptr;  // NULL: those of positions
};

// Valid as long as the batch does not change.
inline BatchView ViewOf(const StepBatch& b) {
  return {b.graph,
          b.num_tokens,
          b.num_seqs,
          b.num_samples,
          b.block_table_stride,
          b.input_ids.data(),
          b.positions.data(),
          b.slot_mapping.data(),
          b.block_tables.data(),
          b.context_lens.data(),
          b.query_start.data(),
          b.sample_index.data(),
          b.adapter_slots.empty() ? nullptr : b.adapter_slots.data(),
          b.state_slots.empty() ? nullptr : b.state_slots.data(),
          b.rope_positions.empty() ? nullptr : b.rope_positions.data()};
}

// Writes the block tables in the form that a graph reads. Returns block_table_stride: the blocks of a token's sequence
// begin at entry token_seq[token] · stride. The batch must have been checked; blocks that do not fit a row are unused.
uint32_t FillBlockTables(const ModelShape& model, const BatchView& batch, int32_t* block_tables, int32_t* token_seq);

// Writes the rotary positions of a model with rope_axes.
void FillRopePositions(const BatchView& batch, int32_t* out);

// Whether a graph holds these counts; must be checked before arrays of that length are read.
Status CheckCounts(const ModelShape& model, uint32_t graph, uint32_t num_tokens, uint32_t num_seqs,
                   uint32_t num_samples, uint32_t block_table_stride);
// Whether the lengths of the arrays match the counts.
Status CheckSizes(const StepBatch& batch);
// Whether all indices used by kernels are in range: counts, ids, positions, slots, blocks of a pool of num_blocks, slots
// of num_states states. Only the dummy slot 0 may be that of several sequences.
Status CheckBatch(const ModelShape& model, uint32_t num_blocks, uint32_t num_states, const BatchView& batch);

}  // namespace llmc
