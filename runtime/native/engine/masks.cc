// Engine, continued: token masks of guided requests, from asking for one to the step that draws with it.
#include <algorithm>
#include <chrono>
#include <string>
#include <tuple>

#include "core/clock.h"
#include "engine/engine.h"
#include "engine/events.h"

namespace llmc {

// Asks the host for the first masks of a request. mutex_ is held.
void Engine::AskForFirstMasks(Request* r) {
  for (uint32_t i = 0; i < r->params.n; ++i) {
    events_.push_back(MakeEvent(*r->sequences[0], i, LLMC_EVENT_NEEDS_MASK));
  }
  r->asked = true;
  num_asked_ += r->params.n;
}

// Requests that started or ended make room to ask for masks of those behind. mutex_ is held.
void Engine::CountAsked() {
  const auto turn = [](Request* r) { return std::tuple(r->sequences[0]->priority, r->id, r); };
  for (Request* r : started_) {
    // The prompt was computed before the host was asked for its masks.
    if (unasked_.erase(turn(r)) > 0 && !r->ended) AskForFirstMasks(r);
  }
  for (std::vector<Request*>* gone : {&started_, &ended_}) {
    for (Request* r : *gone) {
      if (r->asked) num_asked_ -= r->params.n;
      if (!r->asked && r->guided) unasked_.erase(turn(r));
      r->asked = false;
    }
  }
  started_.clear();
  while (!unasked_.empty() && num_asked_ < kMostAsked) {
    AskForFirstMasks(std::get<Request*>(*unasked_.begin()));
    unasked_.erase(unasked_.begin());
  }
}

Status Engine::SetTokenMasks(uint64_t id, uint32_t output_index, const uint32_t* words, uint64_t num_words,
                             const int32_t* guesses, uint64_t num_guesses) {
  const uint64_t most = (static_cast<uint64_t>(model_.vocab_size) + 31) / 32;
  if (num_words < 1 || num_words > most) {
    return Status::Invalid("num_words is " + std::to_string(num_words) + "; use 1 to " + std::to_string(most) +
                           ", one bit for each token of the vocabulary.");
  }
  if (num_guesses > LLMC_MAX_SPECULATE_TOKENS) {
    return Status::Invalid("num_guesses is " + std::to_string(num_guesses) + "; use 0 to " +
                           std::to_string(LLMC_MAX_SPECULATE_TOKENS) + ".");
  }
  for (uint64_t i = 0; i < num_guesses; ++i) {
    if (guesses[i] < 0 || guesses[i] >= model_.vocab_size) {
      return Status::Invalid("guesses[" + std::to_string(i) + "] is " + std::to_string(guesses[i]) + "; use 0 to " +
                             std::to_string(model_.vocab_size - 1) + ".");
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  auto it = live_.find(id);
  if (it == live_.end()) {
    return Status::Error(LLMC_ERR_NOT_FOUND,
                         "Request " + std::to_string(id) + " is unknown or has finished; it needs no mask.");
  }
  Request* r = it->second.get();
  if (!r->guided)
    return Status::Invalid("Request " + std::to_string(id) + " is not guided; submit it with guided = 1.");
  if (output_index >= r->masks.size()) {
    return Status::Invalid("output_index is " + std::to_string(output_index) + " but the request has n = " +
                           std::to_string(r->masks.size()) + "; use 0 to " + std::to_string(r->masks.size() - 1) + ".");
  }
  TokenMask& mask = r->masks[output_index];
  const std::string name = "Continuation " + std::to_string(output_index) + " of request " + std::to_string(id);
  if (mask.state == TokenMask::State::kDone) {
    return Status::Error(LLMC_ERR_NOT_FOUND, name + " has finished; it needs no mask.");
  }
  if (mask.state == TokenMask::State::kTaken) {
    return Status::Invalid(name + " is taking a token by its last mask; set the next one after that token's event.");
  }
  mask_inbox_.push_back(r);  // first: if memory runs out below, looking at the old mask again does no harm
  mask.guesses.assign(guesses, guesses + num_guesses);
  mask.words.assign(words, words + (num_guesses + 1) * num_words);
  mask.num_words = static_cast<uint32_t>(num_words);
  if (mask.state == TokenMask::State::kWanted && mask.asked_ns != 0) {
    const uint64_t late = MonotonicNs() - mask.asked_ns;
    mask.late_ns = mask.late_ns == 0 ? late : (7 * mask.late_ns + late) / 8;
  }
  mask.state = TokenMask::State::kReady;
  changed_.notify_all();
  return Status::Ok();
}

Status Engine::GetGuesses(uint64_t id, uint32_t output_index, int32_t* tokens, uint64_t capacity,
                          uint64_t* count) const {
  std::lock_guard<std::mutex> lock(mutex_);
  *count = 0;
  const auto it = live_.find(id);
  if (it == live_.end() || output_index >= it->second->masks.size()) {
    return Status::Error(LLMC_ERR_NOT_FOUND, "Continuation " + std::to_string(output_index) + " of request " +
                                                 std::to_string(id) +
                                                 " is unknown, is not guided or has finished; it needs no mask.");
  }
  const std::vector<int32_t>& offered = it->second->masks[output_index].offered;
  *count = std::min<uint64_t>(offered.size(), capacity);
  std::copy_n(offered.begin(), *count, tokens);
  return Status::Ok();
}

// A request draws the first token of all its continuations at once, so all their masks must be set.
bool Engine::IsHeld(const Request& r, const Sequence& s) {
  const auto missing = [](const TokenMask& mask) { return mask.state != TokenMask::State::kReady; };
  if (r.beams != nullptr) return r.beams->waits(s);
  if (!r.guided) return false;
  return r.forked ? missing(r.masks[s.output_index]) : std::any_of(r.masks.begin(), r.masks.end(), missing);
}

// Guided sequences whose masks come at different times would split into groups that take turns, in steps that cost about
// as much as steps of them all. So a step waits for masks that are about to come. The wait is a share of a decode step,
// and smaller where it delays sequences that need no mask. Masks that usually come later are not waited for.
void Engine::AwaitMasks() {
  constexpr uint64_t kShare = 4, kShareOfOthers = 16;
  bool ready = false, parked = false, others = scheduler_.num_waiting() > 0;
  for (const Sequence* s : scheduler_.running()) {
    ready = ready || !s->held;
    parked = parked || (s->held && s->guided);
    others = others || !s->guided;
  }
  if (!parked) return;
  const uint64_t most = decode_ns_ / (others ? kShareOfOthers : kShare), begin = MonotonicNs();
  std::unique_lock<std::mutex> lock(mutex_);
  if (!ready && !others && mask_inbox_.empty() && inbox_.empty()) return;
  while (cancel_inbox_.empty()) {
    const uint64_t now = MonotonicNs();
    uint64_t until = now;
    for (const Sequence* s : scheduler_.running()) {
      if (!s->held || !s->guided || !IsHeld(*s->request, *s)) continue;
      const TokenMask& mask = s->request->masks[s->output_index];
      if (mask.late_ns <= most) until = std::max(until, mask.asked_ns + most);
    }
    if (until <= now) break;
    changed_.wait_until(lock,
                        std::chrono::steady_clock::time_point(std::chrono::nanoseconds(static_cast<int64_t>(until))));
  }
  counters_.mask_wait_ns += MonotonicNs() - begin;
}

// From here on, masks of tokens in this step cannot be replaced.
void Engine::TakeMasks(const StepPlan& plan) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const StepItem& item : plan.items) {
    Request* r = item.sequence->request;
    if (!item.sample || !r->guided) continue;
    for (uint32_t i = 0; i < r->masks.size(); ++i) {
      if (!r->forked || i == item.sequence->output_index) r->masks[i].state = TokenMask::State::kTaken;
    }
  }
}

}  // namespace llmc
