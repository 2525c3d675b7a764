// LoRA adapters, common to all devices: the loaded matrices, and the adapter of each row of a step.
#pragma once
#include <cstdint>
#include <vector>

#include "artifact/adapter_slot.h"
#include "device/batch.h"

namespace llmc {

// Update of a part of a linear layer: scale · b a. Row-major: a [rank][columns], b [rows][rank].
struct AdapterMatrix {
  uint32_t linear, part, rank;
  float scale;
  const float *a, *b;
};

// Writes those of `matrices` that belong to the layer to a slot, in the layout of FORMAT.md. Leaves the slot's other
// bytes unchanged.
void PackAdapter(const AdapterSlot& slot, uint32_t linear, const std::vector<AdapterMatrix>& matrices, char* out);

// Groups the rows of a step with adapters into tiles, slot by slot.
class AdapterTiler {
 public:
  // Writes input kAdapterTiles; out has room for max_tokens of the graph.
  void Write(const BatchView& batch, int32_t* out);

 private:
  std::vector<uint32_t> order_;  // of sequences; reused
};

}  // namespace llmc
