// Engine, continued: taking requests in and cancelling them.
#include <algorithm>
#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "core/clock.h"
#include "engine/engine.h"

namespace llmc {

Status Engine::Submit(const llmc_request& c, uint64_t* id) {
  if (c.num_prompt_tokens == 0 || c.prompt_token_ids == nullptr) {
    return Status::Invalid("The prompt is empty; give at least one token id.");
  }
  const bool vectors = model_.vector_width > 0;
  const uint32_t longest = max_length_ - (vectors ? 0 : 1);
  if (c.num_prompt_tokens > longest) {
    const bool pool = max_length_ < static_cast<uint32_t>(model_.max_model_len);
    return Status::Invalid("The prompt has " + std::to_string(c.num_prompt_tokens) + " tokens but at most " +
                           std::to_string(longest) + " fit " +
                           (pool      ? "the KV pool; shorten it or raise kv_bytes or num_blocks."
                            : vectors ? "max_model_len; shorten it."
                                      : "max_model_len with one output token; shorten it."));
  }
  LLMC_RETURN_IF_ERROR(CheckVector(c));
  LLMC_RETURN_IF_ERROR(CheckResumed(c));
  for (uint64_t i = 0; i < c.num_prompt_tokens; ++i) {
    if (c.prompt_token_ids[i] < 0 || c.prompt_token_ids[i] >= model_.vocab_size) {
      return Status::Invalid("prompt_token_ids[" + std::to_string(i) + "] is " + std::to_string(c.prompt_token_ids[i]) +
                             "; use 0 to " + std::to_string(model_.vocab_size - 1) + ".");
    }
  }
  if (c.num_prompt_logprobs < -1 || c.num_prompt_logprobs > LLMC_MAX_TOP_LOGPROBS) {
    return Status::Invalid("num_prompt_logprobs is " + std::to_string(c.num_prompt_logprobs) + "; use -1 (none) to " +
                           std::to_string(LLMC_MAX_TOP_LOGPROBS) + ".");
  }
  auto request = std::make_unique<Request>();
  LLMC_RETURN_IF_ERROR(PlacedRows::Read(model_, c, &request->placed));
  request->vector = c.vector;
  LLMC_RETURN_IF_ERROR(MakeSamplingParams(*c.sampling, model_.vocab_size, &request->params));
  const uint32_t num_prompt = static_cast<uint32_t>(c.num_prompt_tokens - c.num_output_tokens);
  request->max_length = static_cast<uint32_t>(
      std::min<uint64_t>(max_length_, static_cast<uint64_t>(num_prompt) + (vectors ? 0 : request->params.max_tokens)));
  request->first_output = c.output_index;
  request->guided = c.guided != 0;
  request->num_prompt_logprobs = c.num_prompt_logprobs;
  request->deadline_ns = c.deadline_ns;
  request->arrival_ns = MonotonicNs();
  if (request->guided) request->masks.resize(request->params.n);
  auto sequence = std::make_unique<Sequence>();
  sequence->request = request.get();
  if (!request->placed.empty()) sequence->placed = &request->placed;
  sequence->priority = c.priority;
  sequence->num_prompt = num_prompt;
  sequence->guided = sequence->held = request->guided;
  sequence->score_end = c.num_prompt_logprobs < 0 ? 0 : num_prompt - 1;
  sequence->tokens.reserve(request->max_length);
  sequence->tokens.assign(c.prompt_token_ids, c.prompt_token_ids + c.num_prompt_tokens);
  request->sequences.push_back(std::move(sequence));
  LLMC_RETURN_IF_ERROR(SetUpRanking(request.get()));
  request->num_unfinished = request->params.n;

  std::lock_guard<std::mutex> lock(mutex_);
  if (num_queued_ >= options_.max_waiting) {
    return Status::Error(LLMC_ERR_QUEUE_FULL, std::to_string(num_queued_) +
                                                  " requests are waiting, the most allowed; retry later or raise "
                                                  "max_waiting.");
  }
  Request* r = request.get();
  Adapter* adapter = c.adapter == 0 ? nullptr : FindAdapter(c.adapter);
  if (adapter != nullptr) {
    r->adapter = c.adapter;
    r->adapter_slot = static_cast<int32_t>(adapter->slot);
    r->sequences[0]->SetRoot(BlockManager::RootOf(c.adapter));
  } else if (c.adapter != 0) {
    return Status::Error(LLMC_ERR_NOT_FOUND,
                         "Adapter " + std::to_string(c.adapter) + " is not loaded; load it before the request.");
  }
  for (PlacedRows::Part& part : r->placed.parts()) {
    part.name = row_names_.Of(part.identity);
    if (part.name == 0) {
      return Status::Error(LLMC_ERR_INTERNAL,
                           "The engine has met 2^31 images, the most that it tells apart; restart it.");
    }
  }
  r->id = next_id_;
  r->sequences[0]->arrival = r->id;
  if (!c.sampling->has_seed) {
    // Spreads the engine's seed over requests; the sampler mixes it.
    r->params.seed = options_.seed + r->id * 0x9e3779b97f4a7c15ull;
  }
  const uint64_t new_id = r->id;
  const std::size_t num_events = events_.size(), num_arrived = inbox_.size();
  const uint32_t num_asked = num_asked_;
  const std::tuple<int32_t, uint64_t, Request*> turn{c.priority, new_id, r};
  try {
    if (r->guided && num_asked_ < kMostAsked) {
      AskForFirstMasks(r);
    } else if (r->guided) {
      unasked_.insert(turn);
    }
    inbox_.push_back(r);
    live_.emplace(new_id, std::move(request));
  } catch (...) {  // out of memory: nothing may name a request that is gone
    inbox_.resize(num_arrived);
    events_.erase(events_.begin() + static_cast<std::ptrdiff_t>(num_events), events_.end());
    unasked_.erase(turn);
    num_asked_ = num_asked;
    throw;
  }
  if (adapter != nullptr) ++adapter->num_requests;
  ++next_id_;
  ++num_queued_;
  ++stats_.num_waiting;
  *id = new_id;
  changed_.notify_all();
  return Status::Ok();
}

// Checks that a request asks for what the model gives: a vector or tokens.
Status Engine::CheckVector(const llmc_request& c) const {
  if (model_.vector_width == 0) {
    if (c.vector == nullptr) return Status::Ok();
    return Status::Invalid("The request has memory for a vector, but this model writes text; leave vector out.");
  }
  if (c.vector == nullptr) {
    return Status::Invalid(
        "This model gives vectors and writes no text; give memory for a vector, or use another model.");
  }
  if (c.vector_capacity < static_cast<uint64_t>(model_.vector_width)) {
    return Status::Invalid("vector_capacity is " + std::to_string(c.vector_capacity) +
                           " but the model's vectors have " + std::to_string(model_.vector_width) +
                           " floats; give more memory.");
  }
  if (c.sampling->n != 1 || c.guided != 0 || c.num_prompt_logprobs != -1 || c.sampling->best_of > 1 ||
      c.sampling->beam_width != 0) {
    return Status::Invalid(
        "A model that gives vectors draws no tokens: leave n at 1, guided, best_of and beam_width at 0 and "
        "num_prompt_logprobs at -1.");
  }
  return Status::Ok();
}

// Checks the output that a resumed request says it has.
Status Engine::CheckResumed(const llmc_request& c) const {
  if (c.num_output_tokens == 0 && c.output_index == 0) return Status::Ok();
  if (c.num_output_tokens >= c.num_prompt_tokens) {
    return Status::Invalid("num_output_tokens is " + std::to_string(c.num_output_tokens) + " of " +
                           std::to_string(c.num_prompt_tokens) +
                           " prompt_token_ids; leave at least one for the prompt.");
  }
  if (c.num_output_tokens >= c.sampling->max_tokens) {
    return Status::Invalid("num_output_tokens is " + std::to_string(c.num_output_tokens) + " but max_tokens is " +
                           std::to_string(c.sampling->max_tokens) + "; nothing is left to draw.");
  }
  if (c.sampling->n != 1 || c.sampling->best_of > 1 || c.sampling->beam_width != 0 || c.num_prompt_logprobs != -1 ||
      model_.vector_width > 0) {
    return Status::Invalid(
        "A request with num_output_tokens or output_index is one continuation of a model that writes text: leave n at "
        "1, best_of and beam_width at 0 and num_prompt_logprobs at -1.");
  }
  return Status::Ok();
}

Status Engine::Cancel(uint64_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto it = live_.find(id);
  if (it == live_.end()) {
    return Status::Error(LLMC_ERR_NOT_FOUND,
                         "Request " + std::to_string(id) + " is unknown or has finished; nothing to cancel.");
  }
  cancel_inbox_.push_back(it->second.get());
  changed_.notify_all();
  return Status::Ok();
}

}  // namespace llmc
