// What is kept of the states of a text: the last ones, and what was said of a position last.
#include "engine/speculation/hidden_states.h"

#include <vector>

#include "support/check.h"

using namespace llmc;
using namespace llmc_test;

namespace {

constexpr uint32_t kWidth = 3;

// Rows of a step that computes [position, position + count): each says its position and the step.
void Take(HiddenStates* states, uint32_t position, uint32_t count, float step) {
  std::vector<float> rows;
  for (uint32_t i = 0; i < count; ++i) rows.insert(rows.end(), {static_cast<float>(position + i), step, 0.5f});
  states->Take(position, rows.data(), count, kWidth);
}

bool Says(const HiddenStates& states, uint32_t position, float step) {
  const float* row = states.row(position);
  return row[0] == static_cast<float>(position) && row[1] == step && row[2] == 0.5f;
}

void TheLastAreKept() {
  HiddenStates states;
  CHECK_EQ(states.end(), 0u);
  Take(&states, 0, 100, 1);
  Take(&states, 100, 2 * HiddenStates::kMost + 7, 2);
  CHECK_EQ(states.end(), 100 + 2 * HiddenStates::kMost + 7);
  CHECK_EQ(states.first(), states.end() - HiddenStates::kMost);
  for (uint32_t p = states.first(); p < states.end(); ++p) CHECK(Says(states, p, 2));
  Take(&states, states.end(), 1, 3);
  CHECK(Says(states, states.end() - 1, 3) && Says(states, states.first(), 2));
  CHECK_EQ(states.first(), states.end() - HiddenStates::kMost);
}

// Of guesses that were wrong nothing is left, and a text that is computed again begins anew.
void TheLatestCounts() {
  HiddenStates states;
  Take(&states, 40, 10, 1);
  CHECK_EQ(states.first(), 40u);
  Take(&states, 46, 2, 2);
  CHECK_EQ(states.end(), 48u);
  CHECK(Says(states, 45, 1) && Says(states, 46, 2) && Says(states, 47, 2));
  Take(&states, 0, 5, 3);
  CHECK_EQ(states.first(), 0u);
  CHECK_EQ(states.end(), 5u);
  Take(&states, 9, 1, 4);  // what lies between came from elsewhere
  CHECK_EQ(states.first(), 9u);
  CHECK_EQ(states.end(), 10u);
  CHECK(Says(states, 9, 4));
}

}  // namespace

int main() {
  TheLastAreKept();
  TheLatestCounts();
  return Finish("hidden_states_test");
}
