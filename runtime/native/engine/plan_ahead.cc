// Scheduler, continued: the step behind the one in flight. Its shape is known, its tokens are not.
#include <algorithm>

#include "engine/scheduler.h"

namespace llmc {

// The device has the step: its sequences keep the blocks that its rows write to until it has ended.
void Scheduler::Launch(const StepPlan& plan) {
  for (const StepItem& item : plan.items) item.sequence->in_flight += item.count;
}

// The step's rows are done. Sequences that ended meanwhile release the blocks that these rows wrote to.
void Scheduler::TakeBack(const StepPlan& plan) noexcept {
  for (const StepItem& item : plan.items) item.sequence->in_flight -= std::min(item.sequence->in_flight, item.count);
  const auto done = [this](Sequence* s) {
    if (s->in_flight > 0) return false;
    ReleaseBlocks(s);
    return true;
  };
  leaving_.erase(std::remove_if(leaving_.begin(), leaving_.end(), done), leaving_.end());
}

// Whether a waiting sequence would join the step or take the place of a running one. No sequence is parked here.
bool Scheduler::SomebodyComes() {
  if (waiting_.empty()) return false;
  if (running_.empty() || Outranks(**waiting_.begin(), *running_.back())) return true;
  num_ready_ = NumReady();
  if (num_ready_ >= all_seats_ || Crowded()) return false;
  uint64_t id;
  const Sequence* s = NextWaiting(false, &id);
  return s != nullptr && !CrowdsDecodes(*s) && FreeBlocks(*s);
}

// Plans only a decode step of all running sequences: none is admitted or preempted, no shared block is copied, and some
// graph holds the load. If it returns false, nothing has changed.
bool Scheduler::PlanAhead(Continues (*how)(const Sequence&), StepPlan* plan) {
  ready_.clear();
  StepLoad load;
  uint32_t new_blocks = 0;
  for (Sequence* s : running_) {
    const Continues continues = how(*s);
    if (continues == Continues::kUnsure) return false;
    if (continues == Continues::kEnds) continue;
    const uint32_t position = s->num_computed + s->in_flight, blocks = BlocksFor(position + 1);
    const bool shared = blocks == s->blocks.size() && blocks_->ref(s->blocks.back()) > 1;
    if (shared) return false;
    new_blocks += blocks > s->blocks.size();
    load.samples = load.tokens = ++load.seqs;
    load.blocks = std::max(load.blocks, blocks);
    load.all_blocks += blocks;
    ready_.push_back(s);
  }
  if (ready_.empty() || ready_.size() > options_.max_num_seqs || new_blocks > blocks_->num_free()) return false;
  if (!state_copies_.empty()) return false;  // this plan may be dropped
  // Sequences that are certain to end free a seat and blocks, which waiting ones should get first.
  if (!waiting_.empty() && ready_.size() < running_.size()) return false;
  const int graph = ladder_.Choose(load, kDecodePhases);
  if (graph == kNoGraph || SomebodyComes()) return false;
  NewPlan(plan);
  KeepPatience();
  for (Sequence* s : ready_) {
    const uint32_t position = s->num_computed + s->in_flight;
    if (BlocksFor(position + 1) > s->blocks.size()) s->blocks.push_back(blocks_->Allocate());
    plan->items.push_back({s, position, 1, true, s->num_scored, 0});
    KeepStates(&plan->items.back());
    s->last_step = step_;
  }
  plan->load = load;
  plan->graph = static_cast<uint32_t>(graph);
  last_was_prefill_ = crowded_out_ = false;
  return true;
}

}  // namespace llmc
