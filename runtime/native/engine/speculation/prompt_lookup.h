// PromptLookup: guesses that a text continues as it did after an earlier occurrence of its last tokens.
#pragma once
#include <cstdint>
#include <vector>

#include "engine/speculation/suffix_automaton.h"

namespace llmc {

class PromptLookup {
 public:
  // Of a longer text only the last tokens are used: at most kMostTokens, at least half as many.
  static constexpr uint32_t kMostTokens = 32768;

  explicit PromptLookup(uint32_t most_tokens = kMostTokens) : most_tokens_(most_tokens) {}

  // Takes the text, which must extend the text of the last call.
  void Follow(const std::vector<int32_t>& tokens);
  // Number of tokens at the end of the text that occurred before.
  uint32_t match_length() const { return automaton_.match_length(); }
  // Appends `count` tokens that may follow the text, as they followed the earlier occurrence; none without an
  // occurrence. A repetition that reaches the end of the text continues with itself.
  void Guess(const std::vector<int32_t>& tokens, uint32_t count, std::vector<int32_t>* out) const;

 private:
  SuffixAutomaton automaton_;
  uint32_t most_tokens_, begin_ = 0;  // first token of the text that is used
};

}  // namespace llmc
