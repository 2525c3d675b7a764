// The automaton and the lookup against searches that try everything.
#include "engine/speculation/suffix_automaton.h"

#include <algorithm>
#include <random>
#include <vector>

#include "engine/speculation/prompt_lookup.h"
#include "support/check.h"

using namespace llmc;
using namespace llmc_test;

namespace {

struct Found {
  uint32_t length = 0, end = 0;
};

// The longest suffix of text[0, n) that also ends before n, and the last place where it does.
Found Search(const std::vector<int32_t>& text, uint32_t begin = 0) {
  const uint32_t n = static_cast<uint32_t>(text.size());
  Found best;
  for (uint32_t end = n - 1; end > begin; --end) {
    uint32_t length = 0;
    while (length < end - begin && text[end - 1 - length] == text[n - 1 - length]) ++length;
    if (length > best.length) best = {length, end};
  }
  return best;
}

void AgainstSearch(uint32_t seed, int32_t vocab, uint32_t tokens) {
  std::mt19937 rng(seed);
  SuffixAutomaton automaton;
  std::vector<int32_t> text;
  while (text.size() < tokens) {
    const uint32_t size = static_cast<uint32_t>(text.size());
    // New tokens, or some of the text again.
    const uint32_t from = size == 0 ? 0 : rng() % size, count = 1 + rng() % 9;
    const bool again = size > 4 && rng() % 2 == 0;
    for (uint32_t i = 0; i < count && text.size() < tokens; ++i) {
      text.push_back(again ? text[from + i] : static_cast<int32_t>(rng() % static_cast<uint32_t>(vocab)));
      automaton.Append(text.back());
      const Found want = Search(text);
      CHECK_EQ(automaton.size(), text.size());
      CHECK_EQ(automaton.match_length(), want.length);
      if (want.length > 0) CHECK_EQ(automaton.match_end(), want.end);
    }
  }
}

// One token over and over: as many suffixes as tokens, of which only some are noted to end here, too.
void Repetition() {
  SuffixAutomaton automaton;
  for (uint32_t i = 0; i < 5000; ++i) {
    automaton.Append(3);
    CHECK_EQ(automaton.match_length(), i);
    CHECK_EQ(automaton.match_end(), i);
  }
  automaton.Append(4);
  CHECK_EQ(automaton.match_length(), 0u);
  automaton.Clear();
  CHECK_EQ(automaton.size(), 0u);
  automaton.Append(4);
  CHECK_EQ(automaton.match_length(), 0u);
}

void Guesses() {
  PromptLookup lookup;
  std::vector<int32_t> text = {1, 2, 3, 4, 5, 9, 2, 3}, guess = {7};
  lookup.Follow(text);
  CHECK_EQ(lookup.match_length(), 2u);
  lookup.Guess(text, 3, &guess);
  CHECK(guess == std::vector<int32_t>({7, 4, 5, 9}));
  // Behind the end of the text the repetition goes on: 2 3 | 4 5 9 2 3 | 4 5 9 …
  guess.clear();
  lookup.Guess(text, 9, &guess);
  CHECK(guess == std::vector<int32_t>({4, 5, 9, 2, 3, 4, 5, 9, 2}));
  text.push_back(6);
  lookup.Follow(text);
  guess.clear();
  lookup.Guess(text, 4, &guess);
  CHECK(guess.empty());
}

// Of a long text only the last tokens count, and no more than allowed.
void Window() {
  constexpr uint32_t kMost = 64;
  std::mt19937 rng(5);
  PromptLookup lookup(kMost);
  std::vector<int32_t> text, guess;
  uint32_t begin = 0;
  for (uint32_t i = 0; i < 500; ++i) {
    text.push_back(static_cast<int32_t>(rng() % 4));
    if (text.size() - begin > kMost) begin = static_cast<uint32_t>(text.size()) - kMost / 2;
    lookup.Follow(text);
    const Found want = Search(text, begin);
    CHECK_EQ(lookup.match_length(), want.length);
    guess.clear();
    lookup.Guess(text, 1, &guess);
    CHECK_EQ(guess.size(), want.length > 0 ? 1u : 0u);
    if (want.length > 0) CHECK_EQ(guess[0], text[want.end]);
  }
}

}  // namespace

int main() {
  for (uint32_t seed = 0; seed < 30; ++seed) {
    AgainstSearch(seed, 2, 150);
    AgainstSearch(seed, 5, 150);
    AgainstSearch(seed, 1000, 150);
  }
  Repetition();
  Guesses();
  Window();
  CHECK(SuffixAutomaton::MostBytes(1000) < 1000 * 256);
  return Finish("suffix_automaton_test");
}
