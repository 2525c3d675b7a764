#include "device/gpu/step_inputs.h"

#include <algorithm>

namespace llmc {
namespace {

constexpr uint64_t kScalarBytes = kAlignment;  // 8 of int32, then padding
constexpr uint64_t kWordBytes = sizeof(int32_t);
static_assert(kRopePositions == kAdapterTiles + 2 && kNumInputs == kRopePositions + 1, "StepLayout has all inputs");

}  // namespace

StepLayout StepLayout::Of(const GraphRecord& graph) {
  StepLayout layout;
  layout.bytes = kScalarBytes;
  const auto add = [&](uint32_t input) {
    layout.offsets[input] = layout.bytes;
    layout.bytes += InputBytes(graph, input);
  };
  for (uint32_t i = 0; i < kAdapterTiles; ++i) add(i);
  // Of the last ones, a step sends only what it uses.
  add(kRopePositions);
  add(kStateSlots);
  add(kAdapterTiles);
  return layout;
}

uint64_t FillStep(const ModelShape& model, uint32_t num_blocks, const StepBatch& b, const StepLayout& layout,
                  AdapterTiler* tiler, int32_t* out) {
  const auto place = [&](Input input) { return out + layout.offsets[input] / kWordBytes; };
  const auto copy = [&](Input input, const std::vector<int32_t>& from, uint64_t count) {
    std::copy_n(from.data(), count, place(input));
  };
  copy(kInputIds, b.input_ids, b.num_tokens);
  copy(kPositions, b.positions, b.num_tokens);
  copy(kSlotMapping, b.slot_mapping, b.num_tokens);
  copy(kContextLens, b.context_lens, b.num_seqs);
  copy(kQueryStart, b.query_start, uint64_t{b.num_seqs} + 1);
  copy(kSampleIndex, b.sample_index, b.num_samples);
  const uint32_t stride = FillBlockTables(model, ViewOf(b), place(kBlockTables), place(kTokenSeq));
  const int32_t scalars[8] = {static_cast<int32_t>(b.num_tokens),  static_cast<int32_t>(b.num_seqs),
                              static_cast<int32_t>(b.num_samples), static_cast<int32_t>(stride),
                              static_cast<int32_t>(num_blocks),    0};
  std::copy_n(scalars, 8, out);
  if (model.rope_axes > 0) FillRopePositions(ViewOf(b), place(kRopePositions));
  if (model.recurrent()) copy(kStateSlots, b.state_slots, uint64_t{b.num_seqs} * kStateFields);
  const uint64_t bytes = layout.offsets[kAdapterTiles];
  if (model.adapters.empty()) {
    if (model.recurrent()) return bytes;
    return layout.offsets[model.rope_axes > 0 ? kStateSlots : kRopePositions];
  }
  int32_t* tiles = place(kAdapterTiles);
  tiler->Write(ViewOf(b), tiles);
  return bytes + (1 + uint64_t{kTileRecord} * static_cast<uint32_t>(tiles[0])) * kWordBytes;
}

}  // namespace llmc
