// What steps carried, counted by shape: sums, the bound of the table, and beginning anew.
#include "engine/step_shapes.h"

#include "support/check.h"

using namespace llmc;
using namespace llmc_test;

namespace {

llmc_step_shape Shape(uint32_t graph, uint32_t tokens, uint32_t all_blocks = 2) {
  return {0, 1, graph, tokens, tokens, tokens, 2, all_blocks, 0, 0, 0};
}

std::vector<llmc_step_shape> Take(StepShapes* shapes, uint64_t* lost) {
  std::vector<llmc_step_shape> room;
  room.reserve(StepShapes::kMost);
  shapes->Take(&room, lost);
  return room;
}

void TestSums() {
  StepShapes shapes;
  uint64_t lost = 7;
  shapes.Count(Shape(0, 1), 5);  // nobody has asked yet
  CHECK(Take(&shapes, &lost).empty());
  CHECK_EQ(lost, 0u);
  shapes.Count(Shape(0, 1), 3);
  shapes.Count(Shape(1, 1), 4);
  shapes.Count(Shape(0, 1), 5);
  const auto all = Take(&shapes, &lost);
  if (!CHECK_EQ(all.size(), 2u)) return;
  CHECK_EQ(all[0].graph, 0u);
  CHECK_EQ(all[0].count, 2u);
  CHECK_EQ(all[0].replay_ns, 8u);
  CHECK(all[0].replay_ns_squared == 34.0);
  CHECK_EQ(all[1].graph, 1u);
  CHECK_EQ(all[1].count, 1u);
  CHECK(Take(&shapes, &lost).empty());
  shapes.Count(Shape(0, 1), 9);
  const auto again = Take(&shapes, &lost);
  CHECK(again.size() == 1 && again[0].count == 1 && again[0].replay_ns == 9);
  shapes.Count(Shape(0, 1, 2), 1);
  shapes.Count(Shape(0, 1, 3), 1);  // other contexts beside an equally long one
  CHECK_EQ(Take(&shapes, &lost).size(), 2u);
}

void TestBound() {
  StepShapes shapes;
  uint64_t lost = 0;
  Take(&shapes, &lost);
  for (uint32_t round = 0; round < 2; ++round) {
    for (uint32_t i = 0; i < StepShapes::kMost + 3; ++i) shapes.Count(Shape(i % 7, i), 1);
  }
  const auto all = Take(&shapes, &lost);
  CHECK_EQ(all.size(), StepShapes::kMost);
  CHECK_EQ(lost, 6u);
  for (const llmc_step_shape& shape : all) CHECK_EQ(shape.count, 2u);
}

}  // namespace

int main() {
  TestSums();
  TestBound();
  return Finish("step_shapes_test");
}
