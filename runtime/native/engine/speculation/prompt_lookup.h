// PromptLookup: guesses that a text goes on as it did where its last tokens stood before.
#pragma once
#include <cstdint>
#include <vector>

#include "engine/speculation/suffix_automaton.h"

namespace llmc {

class PromptLookup {
 public:
  // Of a longer text only the last tokens are looked at: at most so many, at least half of them.
  static constexpr uint32_t kMostTokens = 32768;

  explicit PromptLookup(uint32_t most_tokens = kMostTokens) : most_tokens_(most_tokens) {}

  // Takes in the text, which begins with what it was at the last call.
  void Follow(const std::vector<int32_t>& tokens);
  // Of the text that it follows, tokens at its end that stood before.
  uint32_t match_length() const { return automaton_.match_length(); }
  // Appends `count` tokens that may follow the text, as they followed before; none where nothing at its end stood before.
  // A repetition that reaches the end of the text goes on with itself.
  void Guess(const std::vector<int32_t>& tokens, uint32_t count, std::vector<int32_t>* out) const;

 private:
  SuffixAutomaton automaton_;
  uint32_t most_tokens_, begin_ = 0;  // of the text, the first token that is looked at
};

}  // namespace llmc
