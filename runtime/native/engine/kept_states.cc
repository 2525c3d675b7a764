// Scheduler, continued: states of a recurrent model. A running sequence has a slot of its own, which its steps read and
// write. Steps also leave states behind full blocks, from which later texts go on, and before guesses.
#include <algorithm>
#include <utility>

#include "engine/scheduler.h"

namespace llmc {

// Gives a sequence that starts running a slot, with the states behind its computed tokens. Copies of a step come before
// its loads, and both before its replay: a kept slot that is taken from its block may still be read by them.
void Scheduler::FindStates(Sequence* s, StepPlan* plan) {
  const bool saved = !s->saved_state.empty() && s->num_computed == s->num_saved;
  const uint32_t block = s->num_computed > 0 && !saved ? hits_.back() : 0;
  const uint32_t kept = block != 0 ? states().of(block) : 0;
  if (block != 0) states().Touch(block);
  s->state_slot = states().Take();
  if (saved) {
    plan->state_loads.push_back({s->saved_state.front(), s->state_slot});
  } else if (kept != 0) {
    CopyStates(kept, s->state_slot);
  }
}

// Lets the step leave states behind a full block, where a later text is likely to go on.
void Scheduler::KeepStates(StepItem* item) {
  if (!recurrent_ || !blocks_->prefix_cache()) return;
  const Sequence& s = *item->sequence;
  const uint32_t tokens = TokensToKeep(s, item->start, item->start + item->count);
  if (tokens == 0) return;
  item->keep_slot = states().Promise(s.blocks[tokens / block_size_ - 1]);
  item->keep_tokens = item->keep_slot != 0 ? tokens : 0;
}

// Lets the step leave the states before its guesses in a slot of the sequence, whose other slot then has those behind
// them. Returns how many guesses there may be: none where no slot is left, or where states are left for other texts, and
// fewer before such a place.
uint32_t Scheduler::KeepBeforeGuesses(uint32_t count, StepItem* item) {
  if (item->keep_slot != 0) return 0;
  Sequence* s = item->sequence;
  const uint32_t tokens = s->num_computed + 1;
  if (blocks_->prefix_cache()) count = std::min(count, keep_every_ - 1 - tokens % keep_every_);
  if (count == 0) return 0;
  s->spare_slot = states().Take();
  if (s->spare_slot == 0) return 0;
  item->keep_tokens = tokens;
  item->keep_slot = s->spare_slot;
  return count;
}

// If all guesses were right, the slot has the states behind the last one. If not, those before the guesses are the last
// good ones.
void Scheduler::SettleStates(const StepItem& item) {
  Sequence* s = item.sequence;
  if (s->spare_slot == 0) return;
  const uint32_t right = s->num_computed - (item.start + item.count - item.num_guesses);
  if (right < item.num_guesses) {
    std::swap(s->state_slot, s->spare_slot);
    s->num_again = right;
  }
  ReleaseSpare(s);
  RegisterBlocks(s);
}

void Scheduler::ReleaseSpare(Sequence* s) {
  if (s->spare_slot != 0) states().GiveBack(std::exchange(s->spare_slot, 0));
}

// Where another text has branched off before; at the end of a prompt, whose last token the same prompt computes again;
// and now and then in a long text, so that one that begins with it computes little again. 0: nowhere in [start, end).
uint32_t Scheduler::TokensToKeep(const Sequence& s, uint32_t start, uint32_t end) const {
  const auto passed = [=](uint32_t tokens) { return tokens > start && tokens <= end; };
  const uint32_t branch = s.branch * block_size_;
  if (passed(branch)) return branch;
  const uint32_t known = (static_cast<uint32_t>(s.tokens.size()) - 1) / block_size_ * block_size_;
  if (passed(known)) return known;
  const uint32_t last = end / block_size_ * block_size_;
  return last / keep_every_ > start / keep_every_ ? last : 0;
}

// A fork's states are copied by the next plan, whoever is in it.
void Scheduler::AddCopied(const StepPlan& plan, std::vector<Request*>* requests) const {
  for (const StepPlan::Copy& copy : plan.state_copies) {
    for (const Sequence* s : running_) {
      if (s->state_slot == copy.to) requests->push_back(s->request);
    }
  }
}

}  // namespace llmc
