// Lookahead: state of a sequence for guessing its next tokens.
#pragma once
#include <memory>

#include "engine/speculation/acceptance.h"
#include "engine/speculation/draft_model.h"
#include "engine/speculation/hidden_states.h"
#include "engine/speculation/prompt_lookup.h"

namespace llmc {

struct Lookahead {
  PromptLookup lookup;
  std::unique_ptr<DraftState> draft;  // for an engine with a draft
  HiddenStates states;  // for an engine whose draft takes hidden states
  Evidence repeated, drafted;  // of guesses of either kind
};

}  // namespace llmc
