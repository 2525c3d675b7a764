// Scheduler, continued: the step behind one that is on its way. Its tokens are not known, but its shape is.
#include <algorithm>

#include "engine/scheduler.h"

namespace llmc {

// The device has the step: what its rows write to stays theirs until it has ended.
void Scheduler::Launch(const StepPlan& plan) {
  for (const StepItem& item : plan.items) item.sequence->in_flight += item.count;
}

// Its rows are done. Who ended meanwhile gives up the blocks that they wrote to.
void Scheduler::TakeBack(const StepPlan& plan) noexcept {
  for (const StepItem& item : plan.items) item.sequence->in_flight -= std::min(item.sequence->in_flight, item.count);
  const auto done = [this](Sequence* s) {
    if (s->in_flight > 0) return false;
    ReleaseBlocks(s);
    return true;
  };
  leaving_.erase(std::remove_if(leaving_.begin(), leaving_.end(), done), leaving_.end());
}

// Whether some waiting sequence would join the step, or take the place of one that runs. Nobody is parked.
bool Scheduler::SomebodyComes() {
  if (waiting_.empty()) return false;
  if (running_.empty() || Outranks(**waiting_.begin(), *running_.back())) return true;
  num_ready_ = NumReady();
  if (num_ready_ >= options_.max_num_seqs || Crowded()) return false;
  uint64_t id;
  const Sequence* s = NextWaiting(false, &id);
  return s != nullptr && !CrowdsDecodes(*s) && FreeBlocks(*s);
}

// Only a decode step of all that run: one in which nobody comes or is preempted, no block is shared and copied, and no
// graph is missed. On false nothing has changed.
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
  // A seat or blocks that become free for certain are for those who wait.
  if (!waiting_.empty() && ready_.size() < running_.size()) return false;
  const int graph = ladder_.Choose(load, kDecodePhases);
  if (graph == kNoGraph || SomebodyComes()) return false;
  NewPlan(plan);
  KeepPatience();
  for (Sequence* s : ready_) {
    const uint32_t position = s->num_computed + s->in_flight;
    if (BlocksFor(position + 1) > s->blocks.size()) s->blocks.push_back(blocks_->Allocate());
    plan->items.push_back({s, position, 1, true, s->num_scored, 0});
    s->last_step = step_;
  }
  plan->load = load;
  plan->graph = static_cast<uint32_t>(graph);
  last_was_prefill_ = crowded_out_ = false;
  return true;
}

}  // namespace llmc
