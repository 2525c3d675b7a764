// Engine, continued: ends of requests, of one or of all when a step fails.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "core/c_struct.h"
#include "core/error.h"
#include "engine/engine.h"
#include "engine/events.h"
#include "engine/make_room.h"
#include "engine/wanted_bucket.h"

namespace llmc {

// Here and below, calls that may run out of memory come first: each continuation then gets exactly one event.
void Engine::Finish(Sequence* s, uint32_t reason, const SampleResult* stop) {
  llmc_event event = MakeEvent(*s, s->output_index, LLMC_EVENT_FINISHED);
  event.finish_reason = reason;
  if (stop != nullptr) {
    SetSample(*stop, &event);
    event.position = static_cast<uint32_t>(s->tokens.size());
    ++event.num_output_tokens;
  }
  new_events_.push_back(event);
  scheduler_.Remove(s);
  s->finished = true;
  Request* r = s->request;
  if (r->guided) mask_updates_.push_back({&r->masks[s->output_index], TokenMask::State::kDone, {}});
  if (--r->num_unfinished == 0) MarkEnded(r);
}

void Engine::MarkEnded(Request* r) {
  ended_.push_back(r);
  r->num_unfinished = 0;
  r->ended = true;
  ++counters_.num_finished;
  if (r->deadline_ns != 0) deadlines_.erase({r->deadline_ns, r});
}

void Engine::EndRequest(Request* r, uint32_t reason) {
  llmc_event facts{};
  facts.kind = LLMC_EVENT_FINISHED;
  facts.finish_reason = reason;
  EndAll(r, facts);
}

void Engine::FailRequest(Request* r, const Status& why) {
  llmc_event facts{};
  facts.kind = LLMC_EVENT_FAILED;
  facts.finish_reason = LLMC_FINISH_ERROR;
  facts.error_code = why.code;
  CopyText(why.message.data(), why.message.size(), sizeof(facts.message), facts.message);
  EndAll(r, facts);
}

// Ends every unfinished continuation with one event each.
void Engine::EndAll(Request* r, const llmc_event& facts) {
  if (r->ended) return;
  if (r->ranks()) return EndUntold(r, facts);
  MakeRoom(&new_events_, r->params.n);
  MakeRoom(&ended_, 1);
  for (uint32_t i = 0; i < r->params.n; ++i) {
    Sequence* s = r->sequences[i < r->sequences.size() ? i : 0].get();
    const bool exists = i < r->sequences.size();
    if (exists && s->finished) continue;
    if (exists) scheduler_.Remove(s);
    llmc_event event = MakeEvent(*s, i, facts.kind);
    event.finish_reason = facts.finish_reason;
    event.error_code = facts.error_code;
    std::memcpy(event.message, facts.message, sizeof(event.message));
    new_events_.push_back(event);
  }
  MarkEnded(r);
}

Status Engine::MissOf(const Sequence& s, const BucketMiss& miss) const {
  if (options_.miss_policy != MissPolicy::kError) {
    return Status::Error(LLMC_ERR_BUCKET_MISS, "No graph holds a sequence of " + std::to_string(s.tokens.size()) +
                                                   " tokens; compile the artifact with larger buckets.");
  }
  const bool decode = miss.phase == Phase::kDecode;
  const uint32_t context = miss.blocks * static_cast<uint32_t>(model_.block_size);
  return Status::Error(LLMC_ERR_BUCKET_MISS, "No " + std::string(decode ? "decode" : "prefill") +
                                                 " graph in use holds " + std::to_string(miss.seqs) +
                                                 " sequences, the longest of up to " + std::to_string(context) +
                                                 " tokens, and misses are errors; add bucket " +
                                                 WantedFor(miss, model_).Name() + " or allow other graphs.");
}

// The device failed at a step, `begun`, whether that has rows in flight or not. If it goes on, only requests of this step
// and of others on their way fail. The KV of all others is right: a step writes to blocks of its own sequences only. A
// copy to swap space may not have arrived, so what the step saved is computed again.
void Engine::FailSteps(const Status& why, EngineStep* begun) {
  const bool goes_on = DeviceGoesOn(why);
  std::vector<Request*> failed;
  const auto add = [&](const EngineStep& step) {
    for (const StepItem& item : step.plan.items) failed.push_back(item.sequence->request);
    scheduler_.AddCopied(step.plan, &failed);
    scheduler_.ForgetSaves(step.plan);
  };
  if (goes_on) {
    add(*begun);
    for (EngineStep* step : {&step_, &ahead_}) {
      if (step != begun && step->launched) add(*step);
    }
    for (const EngineStep& step : more_) {
      if (&step != begun && step.launched) add(step);
    }
  }
  Drain();
  Scheduler::DropGuesses(&begun->plan);
  if (!goes_on) return FailAll(why);
  std::sort(failed.begin(), failed.end(), [](const Request* a, const Request* b) { return a->id < b->id; });
  for (Request* r : failed) FailRequest(r, why);  // once, however many of its sequences are there
}

void Engine::FailAll(const Status& why) {
  std::vector<Request*> all;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [id, request] : live_) {
      if (request->sequences[0]->state != Sequence::State::kNew) all.push_back(request.get());
    }
  }
  std::sort(all.begin(), all.end(), [](const Request* a, const Request* b) { return a->id < b->id; });
  for (Request* r : all) FailRequest(r, why);
}

// A step that ran out of memory may have left anything half made. Scheduler and blocks therefore begin anew, and every
// request is about to fail. Allocates nothing.
void Engine::Forget() noexcept {
  out_of_memory_ = true;
  scheduler_.Clear();
  std::lock_guard<std::mutex> lock(mutex_);
  for (std::vector<Request*>* inbox : {&inbox_, &cancel_inbox_, &mask_inbox_}) inbox->clear();
  for (std::vector<Request*>* inbox : {&arrived_, &cancelled_, &started_}) inbox->clear();
  unasked_.clear();
  num_asked_ = 0;
  for (const auto& [id, request] : live_) {
    request->asked = false;
    for (const auto& s : request->sequences) {
      s->state = Sequence::State::kDone;
      s->held = IsHeld(*request, *s);
    }
  }
  runnable_ = true;  // until all requests have their event
  changed_.notify_all();
}

// May run out of memory itself: requests that have their event keep it, and the next step goes on.
void Engine::FailAfterOutOfMemory() {
  FailAll(Status::Error(LLMC_ERR_OUT_OF_MEMORY, "Memory ran out in a step; use fewer sequences or a smaller KV pool."));
  out_of_memory_ = false;
  Publish(false, false);
}

}  // namespace llmc
