// Engine, continued: best_of and beam search, which report the best continuations once all have ended.
#include <algorithm>
#include <cstring>
#include <utility>

#include "core/clock.h"
#include "engine/engine.h"
#include "engine/events.h"
#include "engine/make_room.h"

namespace llmc {

// The request's only sequence and its max_length must be set.
Status Engine::SetUpRanking(Request* r) const {
  SamplingParams& params = r->params;
  r->num_told = params.n;
  const bool best_of = params.best_of > params.n;
  if (r->guided && (best_of || params.beam_width > 0)) {
    return Status::Error(LLMC_ERR_INVALID_ARGUMENT, "A guided request tells its tokens as they come: leave out " +
                                                        std::string(best_of ? "best_of." : "beam_width."));
  }
  if (best_of) {
    params.n = params.best_of;
    params.num_logprobs = std::max(params.num_logprobs, 0);  // logprobs rank continuations
    r->best_of = std::make_unique<BestOf>();
    r->best_of->drawn.resize(params.n);
  }
  if (params.beam_width > 0) {
    std::vector<int32_t> stops = params.stop_token_ids;
    if (!params.ignore_eos) stops.insert(stops.end(), model_.eos_token_ids.begin(), model_.eos_token_ids.end());
    Sequence* first = r->sequences[0].get();
    r->beams.reset(new BeamGroup{BeamSearch(params, std::move(stops), r->max_length - first->num_prompt), {first}});
  }
  return Status::Ok();
}

// ---- best_of ---------------------------------------------------------------------------------------------------

// Counterpart of AppendToken for continuations that are reported at the end.
void Engine::KeepToken(Sequence* s, const SampleResult& sample, bool stop) {
  Request* r = s->request;
  Transcript& drawn = r->best_of->drawn[s->output_index];
  drawn.Add(sample);
  drawn.stopped = stop;
  if (!stop) s->tokens.push_back(sample.token);
  if (!stop && s->tokens.size() < r->max_length) return;
  scheduler_.Remove(s);
  s->finished = true;
  if (--r->num_unfinished > 0) return;
  std::vector<Transcript> told = std::move(r->best_of->drawn);
  std::stable_sort(told.begin(), told.end(),
                   [](const Transcript& a, const Transcript& b) { return a.logprob() > b.logprob(); });
  told.resize(r->num_told);
  TellRanked(r, told);
}

// ---- beams -----------------------------------------------------------------------------------------------------

// A beam waits until all beams of its request have their candidates: they may run in different steps.
void Engine::TakeBest(Sequence* s, std::vector<TokenLogprob> best) {
  BeamGroup& beams = *s->request->beams;
  beams.search.Take(beams.index(*s), std::move(best));
  s->held = true;
  if (beams.search.complete()) AdvanceBeams(s->request);
}

void Engine::AdvanceBeams(Request* r) {
  counters_.output_tokens += r->beams->search.num_beams();
  std::vector<BeamSearch::Move> moves;
  if (r->beams->search.Advance(&moves)) {
    MoveBeams(r, moves);
  } else {
    TellRanked(r, r->beams->search.Best(r->num_told));
  }
}

// The first beam that continues another one takes over its sequence; others are forks. Beams that end release their
// seats and blocks first.
void Engine::MoveBeams(Request* r, const std::vector<BeamSearch::Move>& moves) {
  const std::vector<Sequence*> before = std::move(r->beams->live);
  std::vector<Sequence*> next(moves.size(), nullptr), spare;
  std::vector<bool> goes_on(before.size(), false);
  for (size_t i = 0; i < moves.size(); ++i) {
    if (goes_on[moves[i].from]) continue;
    goes_on[moves[i].from] = true;
    next[i] = before[moves[i].from];
    next[i]->held = false;
  }
  for (size_t i = 0; i < before.size(); ++i) {
    if (goes_on[i]) continue;
    scheduler_.Remove(before[i]);
    before[i]->held = false;
  }
  for (const auto& one : r->sequences) {
    if (one->state == Sequence::State::kDone) spare.push_back(one.get());
  }
  for (size_t i = 0; i < moves.size(); ++i) {
    if (next[i] == nullptr) next[i] = NewBeam(r, *before[moves[i].from], &spare);
  }
  for (size_t i = 0; i < moves.size(); ++i) next[i]->tokens.push_back(moves[i].token);
  r->beams->live = std::move(next);
}

Sequence* Engine::NewBeam(Request* r, const Sequence& parent, std::vector<Sequence*>* spare) {
  Sequence* child;
  std::vector<int32_t> tokens;
  if (spare->empty()) {
    r->sequences.push_back(std::make_unique<Sequence>());
    child = r->sequences.back().get();
    child->output_index = static_cast<uint32_t>(r->sequences.size()) - 1;
    tokens.reserve(r->max_length);
  } else {
    child = spare->back();
    spare->pop_back();
    const uint32_t index = child->output_index;
    tokens = std::move(child->tokens);
    *child = Sequence();
    child->output_index = index;
  }
  child->request = r;
  child->priority = parent.priority;
  child->arrival = parent.arrival;
  child->num_prompt = parent.num_prompt;
  child->placed = parent.placed;
  child->SetRoot(parent.root_id);
  tokens = parent.tokens;
  child->tokens = std::move(tokens);
  scheduler_.Fork(parent, child);
  return child;
}

// ---- ends ------------------------------------------------------------------------------------------------------

void Engine::TellRanked(Request* r, const std::vector<Transcript>& told) {
  size_t num_events = told.size();
  for (const Transcript& one : told) num_events += one.size();
  MakeRoom(&new_events_, num_events);
  MakeRoom(&ended_, 1);
  for (const auto& s : r->sequences) {
    scheduler_.Remove(s.get());
    s->held = false;
    s->finished = true;
  }
  const Sequence& any = *r->sequences[0];
  r->first_token_ns = MonotonicNs();
  for (uint32_t output = 0; output < told.size(); ++output) {
    const Transcript& one = told[output];
    for (uint32_t i = 0; i < one.size(); ++i) {
      const bool stop = one.stopped && i + 1 == one.size();
      llmc_event event = MakeEvent(any, output, stop ? LLMC_EVENT_FINISHED : LLMC_EVENT_TOKEN);
      SetSample(one.at(i), &event);
      event.position = any.num_prompt + i;
      event.num_output_tokens = i + 1;
      event.finish_reason = stop ? LLMC_FINISH_STOP : LLMC_FINISH_NONE;
      new_events_.push_back(event);
    }
    if (one.stopped) continue;
    llmc_event event = MakeEvent(any, output, LLMC_EVENT_FINISHED);
    event.finish_reason = LLMC_FINISH_LENGTH;
    event.num_output_tokens = one.size();
    new_events_.push_back(event);
  }
  MarkEnded(r);
}

// Ends a request that has reported nothing yet.
void Engine::EndUntold(Request* r, const llmc_event& facts) {
  MakeRoom(&new_events_, r->num_told);
  MakeRoom(&ended_, 1);
  for (const auto& s : r->sequences) {
    scheduler_.Remove(s.get());
    s->held = false;
    s->finished = true;
  }
  for (uint32_t i = 0; i < r->num_told; ++i) {
    llmc_event event = MakeEvent(*r->sequences[0], i, facts.kind);
    event.finish_reason = facts.finish_reason;
    event.error_code = facts.error_code;
    event.num_output_tokens = 0;
    std::memcpy(event.message, facts.message, sizeof(event.message));
    new_events_.push_back(event);
  }
  MarkEnded(r);
}

}  // namespace llmc
