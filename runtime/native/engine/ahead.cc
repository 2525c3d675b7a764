// Engine, continued: the step behind the one that is on its way. It is planned and packed meanwhile, and enqueued before
// the results of the one before are looked at. Whom a result ends has a row in it for nothing: that row is thrown away.
#include "engine/ahead.h"

#include <algorithm>

#include "core/clock.h"
#include "engine/engine.h"

namespace llmc {

// Whether what a sequence computes in the next step is certain but for the token that is drawn now. Masks depend on that
// token, beams on those of others, n continuations fork from a prompt, and a scored prompt runs alone.
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

// Guesses are made behind tokens that are known. What a step copies between blocks, admits, splits or fails is planned
// when the one before has ended; the scheduler says whether there is none of it.
bool Engine::PrepareAhead() {
  if (options_.speculate_tokens > 0 || model_.vector_width > 0) return false;
  if (!scheduler_.PlanAhead(&HowContinues, &ahead_.plan)) return false;
  ahead_.scheduled_ns = MonotonicNs();
  Prepare(&ahead_);
  return true;
}

// Not where somebody came meanwhile, who may run in its place, nor where all rows would be for nothing. The blocks that
// it took belong to sequences that go on, or that end now.
bool Engine::StillWanted() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!inbox_.empty() || !cancel_inbox_.empty()) return false;
  }
  const auto ends = [this](const EngineStep::Drawn& one) {
    const SampleOutcome& outcome = outcomes_[one.task];
    return !outcome.status.ok() || Stops(*ahead_.plan.items[one.row].sequence->request, outcome.result.token);
  };
  return ahead_.drawn.size() < ahead_.batch.num_tokens || !std::all_of(ahead_.drawn.begin(), ahead_.drawn.end(), ends);
}

// The tokens that were left open are there now. A row of a sequence that fails gets any.
Status Engine::EnqueueAhead() {
  for (const EngineStep::Drawn& one : ahead_.drawn) {
    const SampleOutcome& outcome = outcomes_[one.task];
    ahead_.batch.input_ids[one.row] = outcome.status.ok() ? outcome.result.token : 0;
  }
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

// Nothing may be on its way when steps are given up, whatever becomes of them.
void Engine::Drain() noexcept {
  for (EngineStep* step : {&step_, &ahead_}) {
    if (step->on_its_way) {
      step->on_its_way = false;
      try {
        const float* logits = nullptr;
        static_cast<void>(device_->Wait(step->fence, &logits).ok());
      } catch (...) {
      }
    }
    GiveUp(step);
  }
}

}  // namespace llmc
