// LoRA adapters as every device knows them: the matrices that are loaded, and which rows of a step have which adapter.
#pragma once
#include <cstdint>
#include <vector>

#include "artifact/adapter_slot.h"
#include "device/batch.h"

namespace llmc {

// What an adapter adds to a part of a linear layer: scale · b a. Row after row, a [rank][columns], b [rows][rank].
struct AdapterMatrix {
  uint32_t linear, part, rank;
  float scale;
  const float *a, *b;
};

// Writes a layer's matrices, those of `matrices` that are of it, to a slot as FORMAT.md has it. The slot's other bytes
// are left alone.
void PackAdapter(const AdapterSlot& slot, uint32_t linear, const std::vector<AdapterMatrix>& matrices, char* out);

// Gives the rows of a step that have adapters to tiles, a slot after the other.
class AdapterTiler {
 public:
  // Writes input kAdapterTiles, which has room for max_tokens of the graph.
  void Write(const BatchView& batch, int32_t* out);

 private:
  std::vector<uint32_t> order_;  // of sequences; reused
};

}  // namespace llmc
