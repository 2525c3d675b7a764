// Layout of a step's inputs in one device buffer: a step changes them by one small write.
#pragma once
#include <cstdint>

#include "artifact/artifact.h"
#include "device/adapters.h"
#include "device/batch.h"

namespace llmc {

// Offsets of a graph's inputs in that buffer, in bytes; scalars come first.
struct StepLayout {
  uint64_t offsets[kNumInputs] = {};
  uint64_t bytes = 0;

  static StepLayout Of(const GraphRecord& graph);
};

// Writes a batch that fits its graph to `out`, which has room for layout.bytes, and returns the bytes that the device
// needs of it: of adapters only the tiles in use, and nothing of what the model does not have. num_blocks: blocks of the
// pool.
uint64_t FillStep(const ModelShape& model, uint32_t num_blocks, const StepBatch& batch, const StepLayout& layout,
                  AdapterTiler* tiler, int32_t* out);

}  // namespace llmc
