// How many KV blocks and slots of states an engine has.
#pragma once
#include <cstdint>

#include "artifact/model_shape.h"
#include "core/status.h"
#include "device/pool_kind.h"

namespace llmc {

// Those of llmc_engine_options. 0: by rule.
struct PoolOptions {
  uint32_t num_blocks = 0, num_states = 0;
  uint64_t kv_bytes = 0;
  uint32_t max_num_seqs = 0;
};

// *out: without the dummies.
Status PoolSizes(const ModelShape& model, const PoolOptions& options, PoolCounts* out);
// The same with a dummy of each kind that the model has.
PoolCounts WithDummies(const ModelShape& model, const PoolCounts& counts);

}  // namespace llmc
