#include "engine/speculation/prompt_lookup.h"

#include <algorithm>

namespace llmc {

void PromptLookup::Follow(const std::vector<int32_t>& tokens) {
  const uint32_t end = static_cast<uint32_t>(tokens.size());
  if (end - begin_ > most_tokens_) {
    automaton_.Clear();
    begin_ = end - most_tokens_ / 2;
  }
  for (uint32_t i = begin_ + automaton_.size(); i < end; ++i) automaton_.Append(tokens[i]);
}

void PromptLookup::Guess(const std::vector<int32_t>& tokens, uint32_t count, std::vector<int32_t>* out) const {
  if (automaton_.match_length() == 0) return;
  const size_t first = out->size();
  const uint32_t end = begin_ + automaton_.size(), from = begin_ + automaton_.match_end();
  for (uint32_t i = 0; i < count; ++i) {
    out->push_back(from + i < end ? tokens[from + i] : (*out)[first + (from + i - end)]);
  }
}

}  // namespace llmc
