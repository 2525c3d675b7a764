// Which graph holds a load, and how much of one more sequence some graph holds beside it.
#include "engine/graph_ladder.h"

#include "support/check.h"

using namespace llmc;
using namespace llmc_test;

namespace {

constexpr uint32_t kBlock = 4;

ModelShape Model() {
  ModelShape m{};
  m.block_size = kBlock;
  // phase, batch, seq, then what it holds: tokens, sequences, samples, blocks of a sequence
  m.graphs = {{Phase::kPrefill, 1, 16, 16, 2, 2, 4}, {Phase::kPrefill, 1, 8, 8, 2, 2, 8},
              {Phase::kDecode, 4, 16, 4, 4, 4, 4},   {Phase::kDecode, 4, 32, 4, 4, 4, 8},
              {Phase::kDecode, 2, 32, 2, 2, 2, 8},   {Phase::kMixed, 2, 24, 24, 2, 1, 4}};
  return m;
}

void TestChoose() {
  const ModelShape model = Model();
  GraphLadder ladder(model);
  CHECK(ladder.has_mixed());
  CHECK_EQ(ladder.largest_step(), 24u);
  // Least tokens first, then least blocks.
  CHECK_EQ(ladder.Choose({2, 2, 2, 4}, kDecodePhases), 4);
  CHECK_EQ(ladder.Choose({3, 3, 3, 4}, kDecodePhases), 2);
  CHECK_EQ(ladder.Choose({3, 3, 3, 5}, kDecodePhases), 3);
  CHECK_EQ(ladder.Choose({1, 9, 1, 3}, kPrefillPhases), 0);
  CHECK_EQ(ladder.Choose({1, 8, 1, 2}, kPrefillPhases), 1);
  // What is one too many of anything goes elsewhere, or nowhere.
  CHECK_EQ(ladder.Choose({1, 17, 1, 4}, kPrefillPhases), 5);
  CHECK_EQ(ladder.Choose({1, 17, 2, 4}, kAnyPhase), kNoGraph);
  CHECK_EQ(ladder.Choose({5, 5, 5, 1}, kAnyPhase), kNoGraph);
  CHECK_EQ(ladder.Choose({1, 1, 1, 9}, kAnyPhase), kNoGraph);
  CHECK_EQ(ladder.Choose({3, 3, 3, 1}, kPrefillPhases), kNoGraph);
}

void TestRoom() {
  const ModelShape model = Model();
  GraphLadder ladder(model);
  CHECK_EQ(ladder.Room({}, 0, 100, 100, kPrefillPhases), 16u);  // blocks of a sequence end all but one at 16 tokens
  CHECK_EQ(ladder.Room({}, 14, 100, 100, kPrefillPhases), 8u);
  CHECK_EQ(ladder.Room({}, 30, 100, 100, kPrefillPhases), 2u);
  CHECK_EQ(ladder.Room({}, 32, 100, 100, kAnyPhase), 0u);
  CHECK_EQ(ladder.Room({}, 0, 100, 5, kPrefillPhases), 5u);
  CHECK_EQ(ladder.Room({1, 10, 1, 3}, 0, 100, 100, kPrefillPhases), 14u);
  CHECK_EQ(ladder.Room({2, 10, 1, 3}, 0, 100, 100, kPrefillPhases), 0u);
  CHECK_EQ(ladder.Room({1, 1, 1, 1}, 0, 100, 100, kDecodePhases & ~kMixedPhase), 1u);
  // The last token is sampled, and one sample is all that the mixed graph has: it waits for the next step.
  CHECK_EQ(ladder.Room({1, 1, 1, 1}, 0, 10, 10, kMixedPhase), 9u);
  CHECK_EQ(ladder.Room({1, 1, 0, 1}, 0, 10, 10, kMixedPhase), 10u);
}

void TestScoringRoom() {
  const ModelShape model = Model();
  GraphLadder ladder(model);
  CHECK_EQ(ladder.ScoringRoom(0, 0, 100), 4u);  // as many rows as are sampled, in a decode graph here
  CHECK_EQ(ladder.ScoringRoom(0, 0, 3), 3u);
  CHECK_EQ(ladder.ScoringRoom(0, 9, 100), 11u);  // rows that have their scores are not sampled
  CHECK_EQ(ladder.ScoringRoom(31, 31, 100), 1u);
  CHECK_EQ(ladder.ScoringRoom(32, 32, 100), 0u);
}

void TestOffAndNew() {
  ModelShape model = Model();
  GraphLadder ladder(model);
  ladder.Enable(4, false);
  CHECK_EQ(ladder.Choose({2, 2, 2, 4}, kDecodePhases), 2);
  for (uint32_t i = 0; i < 6; ++i) ladder.Enable(i, false);
  CHECK_EQ(ladder.Choose({1, 1, 1, 1}, kAnyPhase), kNoGraph);
  CHECK_EQ(ladder.Room({}, 0, 4, 4, kAnyPhase), 0u);
  CHECK_EQ(ladder.ScoringRoom(0, 0, 4), 0u);
  CHECK_EQ(ladder.largest_step(), 24u);  // a step's budget does not depend on what is on
  model.graphs.push_back({Phase::kPrefill, 1, 40, 40, 1, 1, 16});
  ladder.TakeNewGraphs();
  CHECK_EQ(ladder.largest_step(), 40u);
  CHECK_EQ(ladder.Choose({1, 1, 1, 1}, kAnyPhase), kNoGraph);
  ladder.Enable(6, true);
  CHECK_EQ(ladder.Choose({1, 1, 1, 1}, kAnyPhase), 6);
}

}  // namespace

int main() {
  TestChoose();
  TestRoom();
  TestScoringRoom();
  TestOffAndNew();
  return Finish("graph_ladder_test");
}
