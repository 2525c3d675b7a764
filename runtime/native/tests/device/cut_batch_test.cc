// A step as two steps: which rows, sequences and samples each part has, and what it is told of their contexts.
#include "device/cut_batch.h"

#include <vector>

#include "support/check.h"

namespace {

using llmc::BatchParts;
using llmc::BatchView;
using Ints = std::vector<int32_t>;

// Three sequences: a decode at position 9, a prompt's chunk at positions 4 to 8, a prompt of two tokens.
llmc::StepBatch ThreeSequences() {
  llmc::StepBatch batch;
  batch.num_tokens = 8, batch.num_seqs = 3, batch.num_samples = 3, batch.block_table_stride = 2;
  batch.input_ids = {10, 11, 12, 13, 14, 15, 16, 17};
  batch.positions = {9, 4, 5, 6, 7, 8, 0, 1};
  batch.slot_mapping = {20, 21, 22, 23, 24, 25, 26, 27};
  batch.block_tables = {1, 2, 3, 4, 5, 6};
  batch.context_lens = {10, 9, 2};
  batch.query_start = {0, 1, 6, 8};
  batch.sample_index = {0, 5, 7};
  return batch;
}

void Expect(const BatchView& part, const Ints& ids, const Ints& contexts, const Ints& starts, const Ints& samples,
            int32_t first_block) {
  CHECK_EQ(part.num_tokens, ids.size());
  CHECK_EQ(part.num_seqs, contexts.size());
  CHECK_EQ(part.num_samples, samples.size());
  CHECK(Ints(part.input_ids, part.input_ids + part.num_tokens) == ids);
  CHECK(part.slot_mapping[0] == ids[0] + 10);
  CHECK(Ints(part.context_lens, part.context_lens + part.num_seqs) == contexts);
  CHECK(Ints(part.query_start, part.query_start + part.num_seqs + 1) == starts);
  CHECK(Ints(part.sample_index, part.sample_index + part.num_samples) == samples);
  CHECK_EQ(part.block_tables[0], first_block);
}

void TestASequenceInBothParts() {
  const llmc::StepBatch batch = ThreeSequences();
  BatchParts parts;
  CHECK(llmc::CutBatch(llmc::ViewOf(batch), 4, &parts));
  Expect(parts.first, {10, 11, 12, 13}, {10, 7}, {0, 1, 4}, {0}, 1);
  Expect(parts.second, {14, 15, 16, 17}, {9, 2}, {0, 2, 4}, {1, 3}, 3);
  CHECK_EQ(parts.second.positions[0], 7);
  CHECK(parts.first.state_slots == nullptr && parts.second.state_slots == nullptr);
}

void TestACutBetweenSequences() {
  llmc::StepBatch batch = ThreeSequences();
  batch.adapter_slots = {7, 8, 9};
  batch.state_slots = {4, 0, 0, 5, 16, 6, 7, 0, 0};
  BatchParts parts;
  CHECK(llmc::CutBatch(llmc::ViewOf(batch), 6, &parts));
  Expect(parts.first, {10, 11, 12, 13, 14, 15}, {10, 9}, {0, 1, 6}, {0, 5}, 1);
  Expect(parts.second, {16, 17}, {2}, {0, 2}, {1}, 5);
  CHECK_EQ(parts.second.adapter_slots[0], 9);
  CHECK_EQ(parts.first.state_slots[3], 5);
  CHECK_EQ(parts.second.state_slots[0], 7);
  CHECK(llmc::CutBatch(llmc::ViewOf(batch), 1, &parts));
  Expect(parts.first, {10}, {10}, {0, 1}, {0}, 1);
}

void TestWhatRunsInOnePiece() {
  BatchParts parts;
  llmc::StepBatch samples = ThreeSequences(), positions = ThreeSequences();
  samples.sample_index = {5, 0, 7};
  CHECK(!llmc::CutBatch(llmc::ViewOf(samples), 4, &parts));
  std::swap(positions.positions[2], positions.positions[5]);
  CHECK(!llmc::CutBatch(llmc::ViewOf(positions), 4, &parts));
  CHECK(llmc::CutBatch(llmc::ViewOf(positions), 6, &parts));  // that sequence is in one part
}

}  // namespace

int main() {
  TestASequenceInBothParts();
  TestACutBetweenSequences();
  TestWhatRunsInOnePiece();
  return llmc_test::Finish("cut_batch_test");
}
