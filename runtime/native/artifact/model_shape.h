// Facts about a model and its compiled buckets that scheduler and engine need.
#pragma once
#include <cstdint>
#include <vector>

#include "artifact/adapter_slot.h"

namespace llmc {

constexpr int32_t kPlacedRow = -1;  // in input_ids, in place of a token: a row of the states buffer
constexpr uint32_t kRopeAxes = 3;  // time, height and width, of a token in rope_positions
constexpr uint32_t kStateFields = 3;  // of a sequence's record in state_slots

enum class Phase : uint32_t { kPrefill = 0, kDecode = 1, kMixed = 2 };

// One compiled bucket, as the scheduler sees it.
struct GraphShape {
  Phase phase;
  uint32_t batch, seq;
  uint32_t max_tokens, max_seqs, max_samples, max_blocks_per_seq;
  // KV blocks of all sequences together, in one flat block table; 0: each sequence has its own row of the table
  uint32_t max_blocks = 0;

  // Entries of the block table.
  uint64_t table_blocks() const { return max_blocks != 0 ? max_blocks : uint64_t{max_seqs} * max_blocks_per_seq; }
};

// Facts of the model that the engine needs.
struct ModelShape {
  int32_t num_layers, block_size, vocab_size, max_model_len, max_num_seqs;
  std::vector<int32_t> eos_token_ids;
  uint64_t kv_block_bytes;  // of layers with keys and values, of the stage with the most
  std::vector<GraphShape> graphs;
  int32_t vector_width = 0;  // floats of a prompt's vector; 0: the output is logits to sample from
  bool whole_prompts = false;  // a step must contain all tokens of a prompt, and its KV is not read later
  uint32_t adapter_slots = 0;           // LoRA adapters held at once
  std::vector<AdapterSlot> adapters{};  // the slot layout of each linear layer with an adapter pool

  int32_t states_width = 0;  // floats of the hidden state that graphs output per row; 0: none
  bool takes_states = false;  // graphs also take a hidden state per row, or if places_rows, for each id of kPlacedRow
  bool places_rows = false;
  uint32_t rope_axes = 0;  // kRopeAxes: rotary positions are an input of their own; 0: they are the positions

  // Bytes of a sequence's states, of all layers that have one in place of keys and values; of the stage with the most. 0:
  // no layer has one. A state cannot take back a token.
  uint64_t state_bytes = 0;
  uint64_t max_states = INT32_MAX;  // slots of states that kernels can address, with the dummy slot
  bool recurrent() const { return state_bytes > 0; }

  uint64_t max_kv_blocks = INT32_MAX;  // that kernels can address, with the dummy block
  int32_t kv_dtype = 0;
  uint64_t kv_identity = 0;  // of weights, target and runtime, see Artifact::KvIdentity

  // Floats per row of a graph's output.
  uint32_t output_width() const { return static_cast<uint32_t>(vector_width > 0 ? vector_width : vocab_size); }
};

}  // namespace llmc
