// Lookahead: what a sequence keeps for guesses of its next tokens.
#pragma once
#include <memory>

#include "engine/speculation/acceptance.h"
#include "engine/speculation/draft_model.h"
#include "engine/speculation/hidden_states.h"
#include "engine/speculation/prompt_lookup.h"

namespace llmc {

struct Lookahead {
  PromptLookup lookup;
  std::unique_ptr<DraftState> draft;  // of an engine with a draft
  HiddenStates states;  // of one whose draft takes them
  Evidence evidence;
};

}  // namespace llmc
