// Engine, continued: the step behind the one in flight. It is planned and packed meanwhile, and enqueued before the
// results of the one in flight are processed. If these end a sequence, its row in the step ahead is discarded.
#include "engine/ahead.h"

#include <algorithm>

#include "core/clock.h"
#include "engine/engine.h"

namespace llmc {

// Whether all but the token id of a sequence's next step is certain. It is not for guided sequences, whose masks depend
// on the token drawn now, and beams, which depend on each other. Nor is it for prompts that fork or are scored.
Continues Engine::HowContinues(const Sequence& s) {
  const Request& r = *s.request;
  if (r.guided || r.beams != nullptr || s.held || s.scoring() || (!r.forked && r.params.n > 1))
    return Continues::kUnsure;
  const uint32_t computed = s.num_computed + s.in_flight;
  const uint32_t size = static_cast<uint32_t>(s.tokens.size());
  if (s.in_flight == 0) return computed + 1 == size ? Continues::kWithToken : Continues::kUnsure;
  if (computed != size) return Continues::kUnsure;
  return size + 1 < r.max_length ? Continues::kWithToken : Continues::kEnds;
}

// Not with speculation: guesses are made behind known tokens. Steps that copy blocks, admit, split or fail sequences
// are planned after the one before has ended; PlanAhead refuses them.
bool Engine::PrepareAhead() {
  if (options_.speculate_tokens > 0 || model_.vector_width > 0) return false;
  if (!scheduler_.PlanAhead(&HowContinues, &ahead_.plan)) return false;
  ahead_.scheduled_ns = MonotonicNs();
  Prepare(&ahead_);
  return true;
}

// Whether no request came or was cancelled, which may change the step ahead.
bool Engine::Undisturbed() {
  std::lock_guard<std::mutex> lock(mutex_);
  return inbox_.empty() && cancel_inbox_.empty();
}

// False if somebody came or was cancelled meanwhile, or if every row's sequence ends.
// Blocks allocated for the step need no undoing: they belong to sequences that go on, or that end now.
bool Engine::StillWanted() {
  if (!Undisturbed()) return false;
  const auto ends = [this](const DrawnRow& one) {
    const SampleOutcome& outcome = outcomes_[one.task];
    return !outcome.status.ok() || Stops(*ahead_.plan.items[one.row].sequence->request, outcome.result.token);
  };
  return ahead_.drawn.size() < ahead_.batch.num_tokens || !std::all_of(ahead_.drawn.begin(), ahead_.drawn.end(), ends);
}

// Fills in the tokens that were open when the step was planned. Rows of sequences that fail get token 0.
void Engine::FillDrawn(EngineStep* step) const {
  for (const DrawnRow& one : step->drawn) {
    const SampleOutcome& outcome = outcomes_[one.task];
    step->batch.input_ids[one.row] = outcome.status.ok() ? outcome.result.token : 0;
  }
}

// Enqueues the step ahead before the tokens of the one in flight are known, where the device passes them on. If all of
// its sequences end with these tokens, the step is in vain. A lost step runs again, which a state does not allow.
Status Engine::ChainAhead(bool* chained) {
  *chained = false;
  if (device_->overlap() != Overlap::kChained || model_.recurrent() || !Undisturbed()) return Status::Ok();
  LLMC_RETURN_IF_ERROR(device_->Chain(step_.tasks, ahead_.batch, ahead_.drawn, &ahead_.fence, chained));
  if (!*chained) return Status::Ok();
  ahead_.on_its_way = ahead_.launched = true;
  scheduler_.Launch(ahead_.plan);
  return Status::Ok();
}

// If the host must draw, the step ahead has read wrong tokens: it is given up, and the step before runs again, with the
// same logits. *chained then becomes false.
Status Engine::SampleChained(bool* chained) {
  bool lost = false;
  LLMC_RETURN_IF_ERROR(device_->SampleChained(step_.fence, step_.tasks, &outcomes_, &lost));
  if (!lost) return Status::Ok();
  *chained = false;
  LLMC_RETURN_IF_ERROR(device_->Await(ahead_.fence));
  ahead_.on_its_way = false;
  GiveUp(&ahead_);
  step_.enqueued_ns = MonotonicNs();  // what ran in vain is not part of its time
  LLMC_RETURN_IF_ERROR(EnqueueRows(step_, &step_.fence));
  return device_->Sample(step_.fence, step_.tasks, &outcomes_);
}

Status Engine::EnqueueAhead() {
  FillDrawn(&ahead_);
  LLMC_RETURN_IF_ERROR(device_->BeforeStep());
  ahead_.enqueued_ns = MonotonicNs();
  LLMC_RETURN_IF_ERROR(Enqueue(&ahead_));
  ++counters_.num_ahead_steps;
  return Status::Ok();
}

void Engine::GiveUp(EngineStep* step) noexcept {
  if (step->launched) scheduler_.Abandon(step->plan);
  step->launched = false;
}

// Waits for steps in flight before giving them up; their results and errors do not matter.
void Engine::Drain() noexcept {
  const auto drain = [this](EngineStep* step) {
    if (step->on_its_way) {
      step->on_its_way = false;
      try {
        static_cast<void>(device_->Await(step->fence).ok());
      } catch (...) {
      }
    }
    GiveUp(step);
  };
  drain(&step_);
  drain(&ahead_);
  for (EngineStep& step : more_) drain(&step);
  num_more_ = 0;
}

}  // namespace llmc
