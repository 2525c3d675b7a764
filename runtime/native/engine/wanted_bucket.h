// The bucket to add for a miss: one rule for llmc_bucket_miss and for messages.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>

#include "engine/scheduler.h"

namespace llmc {

struct WantedBucket {
  Phase phase;
  uint32_t batch, seq;

  std::string Name() const {
    const char* phases[] = {"prefill", "decode", "mixed"};
    return std::string(phases[static_cast<uint32_t>(phase)]) + ":" + std::to_string(batch) + "x" + std::to_string(seq);
  }
};

// The missed batch, and the least length among the model's graphs of the phase that holds the step. Contexts grow, and
// the next step should not miss again. If no graph is long enough, the step's own length.
inline WantedBucket WantedFor(const BucketMiss& miss, const ModelShape& model) {
  const uint32_t block_size = static_cast<uint32_t>(model.block_size);
  const uint32_t longest = (static_cast<uint32_t>(model.max_model_len) + block_size - 1) / block_size * block_size;
  const uint32_t seqs = std::max(miss.seqs, 1u);
  const uint32_t needed = miss.phase == Phase::kDecode ? miss.blocks * block_size : (miss.tokens + seqs - 1) / seqs;
  WantedBucket wanted{miss.phase, seqs, 0};
  for (const GraphShape& g : model.graphs) {
    // A graph for a total does not bound the longest sequence.
    if (g.max_blocks == 0 && g.phase == miss.phase && g.seq >= needed && (wanted.seq == 0 || g.seq < wanted.seq))
      wanted.seq = g.seq;
  }
  if (wanted.seq == 0) wanted.seq = std::min(needed, longest);
  return wanted;
}

}  // namespace llmc
