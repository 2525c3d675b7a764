// Scheduler, continued: rows and blocks of guesses.
#include <algorithm>

#include "engine/scheduler.h"

namespace llmc {

uint32_t Scheduler::GuessRoom(const StepPlan& plan) const {
  const uint32_t room = ladder_.Spare(plan.load, GuessPhases(plan));
  return plan.mixed ? std::min(room, budget() - std::min(budget(), plan.load.tokens)) : room;
}

// Adds `count` guesses behind the one token of an item. Adds fewer if blocks are short: no sequence is preempted for a
// guess.
uint32_t Scheduler::AddGuesses(const int32_t* guesses, uint32_t count, StepItem* item, StepPlan* plan) {
  Sequence* s = item->sequence;
  while (s->blocks.size() < BlocksFor(s->num_computed + 1 + count)) {
    const uint32_t block = blocks_->num_free() > watermark_ ? blocks_->Allocate() : 0;
    if (block == 0) {
      count = static_cast<uint32_t>(s->blocks.size()) * block_size_ - s->num_computed - 1;
      break;
    }
    s->blocks.push_back(block);
  }
  if (recurrent_ && count > 0) count = KeepBeforeGuesses(count, item);
  if (count == 0) {
    TrimBlocks(s);
    return 0;
  }
  plan->guessing = true;
  item->num_guesses = count;
  item->count += count;
  // Capacity for all tokens of the request was reserved.
  s->tokens.insert(s->tokens.end(), guesses, guesses + count);
  plan->load.tokens += count;
  plan->load.samples += count;
  const uint32_t blocks = BlocksFor(item->start + item->count);
  plan->load.blocks = std::max(plan->load.blocks, blocks);
  plan->load.all_blocks += blocks - BlocksFor(item->start + item->count - count);
  return count;
}

// Chooses the graph of a step with guesses. Drops the guesses and returns false if no graph holds them.
bool Scheduler::ChooseForGuesses(StepPlan* plan) {
  const int graph = ladder_.Choose(plan->load, GuessPhases(*plan));
  if (graph != kNoGraph) {
    plan->graph = static_cast<uint32_t>(graph);
    return true;
  }
  DropGuesses(plan);
  plan->load = {};
  for (StepItem& item : plan->items) {
    item.count -= item.num_guesses;
    if (item.num_guesses > 0) {
      TrimBlocks(item.sequence);
      if (item.sequence->spare_slot != 0) item.keep_tokens = item.keep_slot = 0;
      ReleaseSpare(item.sequence);
    }
    item.num_guesses = 0;
    AddToLoad(&plan->load, *item.sequence, item.count - item.num_again);
  }
  return false;
}

void Scheduler::DropGuesses(StepPlan* plan) noexcept {
  if (!plan->guessing) return;
  plan->guessing = false;
  for (const StepItem& item : plan->items) {
    if (item.num_guesses > 0) item.sequence->tokens.resize(item.start + item.count - item.num_guesses);
  }
}

void Scheduler::KeepGuess(Sequence* s) {
  ++s->num_computed;
  if (!recurrent_) RegisterBlocks(s);
}

void Scheduler::TrimBlocks(Sequence* s) {
  if (s->state != Sequence::State::kRunning) return;
  for (; s->blocks.size() > BlocksFor(static_cast<uint32_t>(s->tokens.size())); s->blocks.pop_back()) {
    blocks_->Release(s->blocks.back());
  }
}

}  // namespace llmc
