// Engine, continued: turns a step's tokens and vectors into tokens and events of requests.
#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "core/clock.h"
#include "engine/engine.h"
#include "engine/events.h"
#include "engine/make_room.h"

namespace llmc {
namespace {

bool Contains(const std::vector<int32_t>& ids, int32_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

}  // namespace

// Lists the sequence of each task, in order. A request whose prompt is done has n sequences from now on.
void Engine::NameOwners() {
  owners_.clear();
  for (const StepItem& item : step_.plan.items) {
    Request* r = item.sequence->request;
    if (r->first_scheduled_ns == 0) {
      r->first_scheduled_ns = step_.scheduled_ns;
      if (r->guided) started_.push_back(r);
    }
    owners_.insert(owners_.end(), item.num_scores, item.sequence);
    if (!item.sample) continue;
    if (r->forked) {
      owners_.insert(owners_.end(), 1 + item.num_guesses, item.sequence);
    } else if (r->ended) {  // while its prompt was in flight
      owners_.insert(owners_.end(), r->beams != nullptr ? 1 : r->params.n, item.sequence);
    } else {
      Fork(item.sequence);
      for (const auto& one : r->sequences) owners_.push_back(one.get());
    }
  }
}

void Engine::Fork(Sequence* parent) {
  Request* r = parent->request;
  r->forked = true;
  counters_.prompt_tokens += parent->num_prompt;
  counters_.cached_tokens += std::min(parent->num_cached, parent->num_prompt);
  for (uint32_t i = 1; i < (r->beams != nullptr ? 1 : r->params.n); ++i) {
    auto child = std::make_unique<Sequence>();
    child->request = r;
    child->priority = parent->priority;
    child->arrival = parent->arrival;
    child->output_index = i;
    child->num_prompt = parent->num_prompt;
    child->SetRoot(parent->root_id);
    child->tokens.reserve(r->max_length);
    child->tokens = parent->tokens;
    child->placed = parent->placed;
    scheduler_.Fork(*parent, child.get());
    speculator_.Fork(*parent, child.get());
    r->sequences.push_back(std::move(child));
  }
}

// Whether the token ends the request.
bool Engine::Stops(const Request& r, int32_t token) const {
  return (!r.params.ignore_eos && Contains(model_.eos_token_ids, token)) || Contains(r.params.stop_token_ids, token);
}

// Whether a task draws behind a guess that the task before it confirmed.
bool Engine::ComesTrue(std::size_t task) const {
  return task < step_.tasks.size() && step_.guessed[task] != EngineStep::kNoGuess &&
         outcomes_[task - 1].result.token == step_.guessed[task];
}

void Engine::Postprocess() {
  NameOwners();
  // At most TOKEN and FINISHED or NEEDS_MASK each: every appended token is reported.
  MakeRoom(&new_events_, 2 * step_.tasks.size());
  bool guessed_right = true;
  for (size_t i = 0; i < step_.tasks.size(); ++i) {
    const SampleTask& task = step_.tasks[i];
    const SampleOutcome& outcome = outcomes_[i];
    Sequence* s = owners_[i];
    guessed_right = step_.guessed[i] == EngineStep::kNoGuess || (guessed_right && ComesTrue(i));
    if (s->state == Sequence::State::kDone) continue;  // a sibling failed the request, or the last token ended it
    if (!guessed_right) continue;
    if (step_.guessed[i] != EngineStep::kNoGuess) {
      scheduler_.KeepGuess(s);
      ++counters_.accepted_tokens;
    }
    if (outcome.status.ok() && task.num_best > 0) {
      TakeBest(s, outcome.best);
    } else if (outcome.status.ok() && task.params == nullptr) {
      llmc_event event = MakeEvent(*s, 0, LLMC_EVENT_PROMPT_LOGPROBS);
      SetSample(outcome.result, &event);
      event.position = task.position;
      new_events_.push_back(event);
    } else if (outcome.status.ok()) {
      AppendToken(s, outcome.result, ComesTrue(i + 1));
    } else {
      // Its keys and values may not be finite either: no sequence may begin with them.
      if (outcome.status.code == LLMC_ERR_NOT_FINITE) {
        for (const auto& one : s->request->sequences) scheduler_.Forget(*one);
      }
      FailRequest(s->request, outcome.status);
    }
  }
  bool speculative = false;
  for (const StepItem& item : step_.plan.items) {
    if (item.num_guesses == 0) continue;
    speculative = true;
    counters_.drafted_tokens += item.num_guesses;
    scheduler_.SettleStates(item);
    scheduler_.TrimBlocks(item.sequence);
  }
  counters_.num_speculative_steps += speculative;
}

// Gives each prompt that is done its vector, and ends its request. rows: [prompts that end in this step][width], in the
// order of items.
void Engine::GiveVectors(const float* rows) {
  const size_t width = static_cast<size_t>(model_.vector_width);
  MakeRoom(&new_events_, step_.plan.items.size());
  for (const StepItem& item : step_.plan.items) {
    Request* r = item.sequence->request;
    if (r->first_scheduled_ns == 0) r->first_scheduled_ns = step_.scheduled_ns;
    if (!item.sample) continue;
    if (r->ended) {  // while its prompt was in flight
      rows += width;
      continue;
    }
    Fork(item.sequence);
    if (std::all_of(rows, rows + width, [](float value) { return std::isfinite(value); })) {
      std::copy_n(rows, width, r->vector);
      r->first_token_ns = MonotonicNs();
      Finish(item.sequence, LLMC_FINISH_STOP, nullptr);
    } else {
      scheduler_.Forget(*item.sequence);
      FailRequest(r, Status::Error(LLMC_ERR_NOT_FINITE,
                                   "A number of the prompt's vector is NaN or infinite; the model "
                                   "or the precision it was compiled with does not suit it."));
    }
    rows += width;
  }
}

void Engine::AppendToken(Sequence* s, const SampleResult& sample, bool more) {
  const bool stop = Stops(*s->request, sample.token);
  ++counters_.output_tokens;
  if (s->request->best_of != nullptr) return KeepToken(s, sample, stop);
  if (stop) {
    Request* r = s->request;
    if (r->first_token_ns == 0) r->first_token_ns = MonotonicNs();
    return Finish(s, LLMC_FINISH_STOP, &sample);
  }
  s->tokens.push_back(sample.token);
  llmc_event event = MakeEvent(*s, s->output_index, LLMC_EVENT_TOKEN);
  SetSample(sample, &event);
  event.position = static_cast<uint32_t>(s->tokens.size()) - 1;
  new_events_.push_back(event);
  Request* r = s->request;
  if (r->first_token_ns == 0) r->first_token_ns = event.time_ns;
  if (s->tokens.size() >= r->max_length) return Finish(s, LLMC_FINISH_LENGTH, nullptr);
  if (!r->guided || more) return;
  s->held = true;
  mask_updates_.push_back({&r->masks[s->output_index], TokenMask::State::kWanted, speculator_.Offer(s)});
  new_events_.push_back(MakeEvent(*s, s->output_index, LLMC_EVENT_NEEDS_MASK));
}

}  // namespace llmc
