// Slots of states in a step: what CheckBatch refuses, and where devices with memory of their own find them.
#include <string>
#include <vector>

#include "device/batch.h"
#include "device/gpu/step_inputs.h"
#include "support/check.h"

namespace {

using llmc::ModelShape;
using llmc::Status;
using llmc::StepBatch;
using Ints = std::vector<int32_t>;

constexpr uint32_t kNumBlocks = 4, kNumStates = 6;

ModelShape Model(uint64_t state_bytes) {
  ModelShape model{};
  model.num_layers = 1, model.block_size = 16, model.vocab_size = 8, model.max_model_len = 32, model.max_num_seqs = 3;
  model.state_bytes = state_bytes;
  model.graphs = {{llmc::Phase::kDecode, 3, 32, 4, 3, 3, 2}};
  return model;
}

StepBatch ThreeSequences(const Ints& state_slots) {
  StepBatch batch;
  batch.num_tokens = batch.num_seqs = 3, batch.block_table_stride = 1;
  batch.input_ids = batch.positions = {0, 1, 2};
  batch.slot_mapping = {16, 33, 50};
  batch.block_tables = {1, 2, 3};
  batch.context_lens = {1, 2, 3};
  batch.query_start = {0, 1, 2, 3};
  batch.state_slots = state_slots;
  return batch;
}

Status Check(const Ints& state_slots, const ModelShape& model = Model(8), uint32_t num_states = kNumStates) {
  const StepBatch batch = ThreeSequences(state_slots);
  LLMC_RETURN_IF_ERROR(CheckSizes(batch));
  return CheckBatch(model, kNumBlocks, num_states, ViewOf(batch));
}

void Refuses(const Ints& state_slots, const std::string& why) {
  const Status status = Check(state_slots);
  CHECK(!status.ok());
  if (!CHECK(status.message.find(why) != std::string::npos)) std::fprintf(stderr, "%s\n", status.message.c_str());
}

void TestChecks() {
  CHECK(Check({1, 0, 0, 2, 0, 0, 5, 0, 0}).ok());
  CHECK(Check({1, 16, 3, 2, 32, 4, 5, 0, 0}).ok());
  // The dummy slot may be that of all, and of what they keep.
  CHECK(Check({0, 16, 0, 0, 32, 0, 0, 0, 0}).ok());
  // A slot that nothing is kept in is not written.
  CHECK(Check({1, 0, 2, 2, 0, 1, 5, 0, 5}).ok());
  Refuses({1, 0, 0, 2, 0, 0}, "state_slots has 6 elements and needs 9");
  Refuses({}, "state_slots is missing");
  Refuses({1, 0, 0, 6, 0, 0, 5, 0, 0}, "state_slots[3] is 6, outside 0 … 5");
  Refuses({-1, 0, 0, 2, 0, 0, 5, 0, 0}, "state_slots[0] is -1, outside 0 … 5");
  Refuses({1, 33, 3, 2, 0, 0, 5, 0, 0}, "state_slots[1] is 33, outside 0 … 32");
  Refuses({1, -1, 3, 2, 0, 0, 5, 0, 0}, "state_slots[1] is -1");
  Refuses({1, 0, 0, 2, 0, 0, 5, 0, 6}, "state_slots[8] is 6, outside 0 … 5");
  Refuses({1, 0, 0, 2, 0, 0, 5, 16, -2}, "state_slots[8] is -2");
  Refuses({1, 0, 0, 2, 0, 0, 1, 0, 0}, "state_slots has slot 1 twice");
  Refuses({1, 16, 1, 2, 0, 0, 5, 0, 0}, "state_slots has slot 1 twice");
  Refuses({1, 16, 5, 2, 0, 0, 5, 0, 0}, "state_slots has slot 5 twice");
  Refuses({1, 16, 3, 2, 16, 3, 5, 0, 0}, "state_slots has slot 3 twice");
}

void TestAModelWithoutStates() {
  CHECK(Check({}, Model(0), 0).ok());
  CHECK(Check({0, 0, 0, 0, 0, 0, 0, 0, 0}, Model(0), 0).message.find("state_slots is given and no layer") == 0);
}

// Inputs that a step does not have are behind those that it sends, and tiles of adapters behind all.
void TestStepInputs() {
  llmc::GraphRecord graph{};
  graph.phase = 1, graph.max_tokens = 4, graph.max_seqs = 3, graph.max_samples = 3, graph.max_blocks_per_seq = 2;
  const llmc::StepLayout layout = llmc::StepLayout::Of(graph);
  CHECK(layout.offsets[llmc::kRopePositions] > layout.offsets[llmc::kTokenSeq]);
  CHECK(layout.offsets[llmc::kStateSlots] == layout.offsets[llmc::kRopePositions] + 64);
  CHECK(layout.offsets[llmc::kAdapterTiles] == layout.offsets[llmc::kStateSlots] + 64);
  CHECK(layout.bytes > layout.offsets[llmc::kAdapterTiles]);
  llmc::AdapterTiler tiler;
  const Ints slots = {1, 16, 3, 2, 32, 4, 5, 0, 0};
  Ints words(layout.bytes / sizeof(int32_t), -1);
  const auto at = words.begin() + static_cast<int64_t>(layout.offsets[llmc::kStateSlots] / sizeof(int32_t));
  CHECK_EQ(FillStep(Model(0), kNumBlocks, ThreeSequences({}), layout, &tiler, words.data()),
           layout.offsets[llmc::kRopePositions]);
  CHECK(*at == -1);
  CHECK_EQ(FillStep(Model(8), kNumBlocks, ThreeSequences(slots), layout, &tiler, words.data()),
           layout.offsets[llmc::kAdapterTiles]);
  CHECK(Ints(at, at + 9) == slots && *(at + 9) == -1);
  ModelShape axes = Model(0);
  axes.rope_axes = llmc::kRopeAxes;
  const auto turned = words.begin() + static_cast<int64_t>(layout.offsets[llmc::kRopePositions] / sizeof(int32_t));
  CHECK_EQ(FillStep(axes, kNumBlocks, ThreeSequences({}), layout, &tiler, words.data()),
           layout.offsets[llmc::kStateSlots]);
  StepBatch placed = ThreeSequences({});
  const Ints plain(turned, turned + 3 * placed.num_tokens);
  for (uint32_t i = 0; i < plain.size(); ++i) CHECK_EQ(plain[i], placed.positions[i / 3]);
  for (uint32_t i = 0; i < plain.size(); ++i) placed.rope_positions.push_back(static_cast<int32_t>(i) % 7);
  CHECK(llmc::CheckBatch(axes, kNumBlocks, 0, ViewOf(placed)).ok());
  CHECK(llmc::CheckBatch(Model(0), kNumBlocks, 0, ViewOf(placed)).message.find("leave it out") != std::string::npos);
  FillStep(axes, kNumBlocks, placed, layout, &tiler, words.data());
  CHECK(Ints(turned, turned + 3 * placed.num_tokens) == placed.rope_positions);
  placed.rope_positions[4] = -1;
  CHECK(llmc::CheckBatch(axes, kNumBlocks, 0, ViewOf(placed)).message.find("rope_positions[4] is -1") == 0);
  placed.rope_positions.resize(4);
  CHECK(llmc::CheckSizes(placed).message.find("rope_positions has 4 elements") == 0);
  ModelShape adapters = Model(8);
  adapters.adapter_slots = 1;
  adapters.adapters.resize(1);
  const uint64_t bytes = FillStep(adapters, kNumBlocks, ThreeSequences(slots), layout, &tiler, words.data());
  CHECK_EQ(bytes, layout.offsets[llmc::kAdapterTiles] + sizeof(int32_t));
}

}  // namespace

int main() {
  TestChecks();
  TestAModelWithoutStates();
  TestStepInputs();
  return llmc_test::Finish("state_inputs_test");
}
