// What scheduler and engine must know of a model and of its compiled buckets.
#pragma once
#include <cstdint>
#include <vector>

namespace llmc {

enum class Phase : uint32_t { kPrefill = 0, kDecode = 1, kMixed = 2 };

// One compiled bucket, as the scheduler sees it.
struct GraphShape {
  Phase phase;
  uint32_t batch, seq;
  uint32_t max_tokens, max_seqs, max_samples, max_blocks_per_seq;
};

// Facts of the model that the engine needs.
struct ModelShape {
  int32_t num_layers, block_size, vocab_size, max_model_len, max_num_seqs;
  std::vector<int32_t> eos_token_ids;
  uint64_t kv_block_bytes;
  std::vector<GraphShape> graphs;
};

}  // namespace llmc
