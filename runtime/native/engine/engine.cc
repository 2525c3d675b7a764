#include "engine/engine.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <new>
#include <string>

#include "core/c_struct.h"
#include "core/clock.h"
#include "core/error.h"
#include "engine/make_room.h"
#include "engine/wanted_bucket.h"

namespace llmc {
namespace {

bool Contains(const std::vector<int32_t>& ids, int32_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

Status Invalid(std::string message) { return Status::Error(LLMC_ERR_INVALID_ARGUMENT, std::move(message)); }

}  // namespace

Status Engine::Create(std::unique_ptr<Device> device, const EngineOptions& options, std::unique_ptr<Engine>* out,
                      std::unique_ptr<Device> draft) {
  const ModelShape& model = device->model();
  if (model.block_size < 1 || model.vocab_size < 1 || model.max_model_len < 2 || model.max_num_seqs < 1 ||
      model.graphs.empty()) {
    return Status::Error(LLMC_ERR_CORRUPT, "The artifact's model facts are unusable: block_size " +
                                               std::to_string(model.block_size) + ", vocab_size " +
                                               std::to_string(model.vocab_size) + ", max_model_len " +
                                               std::to_string(model.max_model_len) + ", " +
                                               std::to_string(model.graphs.size()) + " graphs; build it again.");
  }
  if (options.max_num_seqs > static_cast<uint32_t>(model.max_num_seqs)) {
    return Invalid("max_num_seqs is " + std::to_string(options.max_num_seqs) + " but the artifact was built for " +
                   std::to_string(model.max_num_seqs) + "; lower it or build the artifact with a larger one.");
  }
  if (device->num_blocks() < 2 || static_cast<uint64_t>(device->num_blocks() - 1) * model.block_size < 2) {
    return Invalid("The KV pool has no block besides the dummy block; raise kv_bytes or num_blocks.");
  }
  std::unique_ptr<DraftModel> drafts;
  if (draft != nullptr) LLMC_RETURN_IF_ERROR(DraftModel::Create(std::move(draft), model, &drafts));
  std::unique_ptr<Engine> made(new Engine(std::move(device), options, std::move(drafts)));
  if (options.swap_bytes > 0) LLMC_RETURN_IF_ERROR(made->OpenSwapSpace());
  *out = std::move(made);
  return Status::Ok();
}

Engine::Engine(std::unique_ptr<Device> device, const EngineOptions& options, std::unique_ptr<DraftModel> draft)
    : device_(std::move(device)),
      model_(device_->model()),
      options_(options),
      max_length_(static_cast<uint32_t>(std::min<uint64_t>(
          model_.max_model_len, static_cast<uint64_t>(device_->num_blocks() - 1) * model_.block_size))),
      blocks_(device_->num_blocks(), static_cast<uint32_t>(model_.block_size),
              options.prefix_cache && !model_.whole_prompts),
      scheduler_(model_,
                 {options.max_num_seqs ? options.max_num_seqs : static_cast<uint32_t>(model_.max_num_seqs),
                  options.max_tokens_per_step, options.miss_policy,
                  options.priority_patience ? options.priority_patience : SchedulerOptions::kDefaultPatience},
                 &blocks_),
      host_sampler_(*device_),
      speculator_(options.speculate_tokens, options.speculate_always, std::move(draft)),
      graph_stats_(model_.graphs.size()) {
  if (options_.max_waiting == 0) options_.max_waiting = 65536;
  std::memset(&counters_, 0, sizeof(counters_));
  counters_.max_request_tokens = max_length_;
  Publish(false, false);
}

Status Engine::OpenSwapSpace() {
  const uint64_t bytes = std::max<uint64_t>(model_.kv_block_bytes, 1);
  const uint64_t places = std::min<uint64_t>(options_.swap_bytes / bytes, UINT32_MAX);
  if (places == 0) {
    return Invalid("swap_bytes is " + std::to_string(options_.swap_bytes) + " but a KV block has " +
                   std::to_string(bytes) + " bytes; raise it, or leave it out.");
  }
  LLMC_RETURN_IF_ERROR(device_->OpenSwapSpace(static_cast<uint32_t>(places), &swap_block_ns_));
  scheduler_.swap()->Open(static_cast<uint32_t>(places), options_.swap_always);
  return Status::Ok();
}

// ---- from any thread -------------------------------------------------------------------------------------------

Status Engine::Submit(const llmc_request& c, uint64_t* id) {
  if (c.num_prompt_tokens == 0 || c.prompt_token_ids == nullptr) {
    return Invalid("The prompt is empty; give at least one token id.");
  }
  const bool vectors = model_.vector_width > 0;
  const uint32_t longest = max_length_ - (vectors ? 0 : 1);
  if (c.num_prompt_tokens > longest) {
    const bool pool = max_length_ < static_cast<uint32_t>(model_.max_model_len);
    return Invalid("The prompt has " + std::to_string(c.num_prompt_tokens) + " tokens but at most " +
                   std::to_string(longest) + " fit " +
                   (pool      ? "the KV pool; shorten it or raise kv_bytes or num_blocks."
                    : vectors ? "max_model_len; shorten it."
                              : "max_model_len with one output token; shorten it."));
  }
  LLMC_RETURN_IF_ERROR(CheckVector(c));
  LLMC_RETURN_IF_ERROR(CheckResumed(c));
  for (uint64_t i = 0; i < c.num_prompt_tokens; ++i) {
    if (c.prompt_token_ids[i] < 0 || c.prompt_token_ids[i] >= model_.vocab_size) {
      return Invalid("prompt_token_ids[" + std::to_string(i) + "] is " + std::to_string(c.prompt_token_ids[i]) +
                     "; use 0 to " + std::to_string(model_.vocab_size - 1) + ".");
    }
  }
  if (c.num_prompt_logprobs < -1 || c.num_prompt_logprobs > LLMC_MAX_TOP_LOGPROBS) {
    return Invalid("num_prompt_logprobs is " + std::to_string(c.num_prompt_logprobs) + "; use -1 (none) to " +
                   std::to_string(LLMC_MAX_TOP_LOGPROBS) + ".");
  }
  auto request = std::make_unique<Request>();
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
  sequence->priority = c.priority;
  sequence->num_prompt = num_prompt;
  sequence->held = request->guided;
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
  r->id = next_id_;
  r->sequences[0]->arrival = r->id;
  if (!c.sampling->has_seed) {
    // Spread the engine's seed over requests; the sampler mixes it.
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
  } catch (...) {  // out of memory: nothing may name a request that is no more
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

// Whether a request is one for what the model gives, a vector or tokens.
Status Engine::CheckVector(const llmc_request& c) const {
  if (model_.vector_width == 0) {
    if (c.vector == nullptr) return Status::Ok();
    return Invalid("The request has memory for a vector, but this model writes text; leave vector out.");
  }
  if (c.vector == nullptr) {
    return Invalid("This model gives vectors and writes no text; give memory for a vector, or use another model.");
  }
  if (c.vector_capacity < static_cast<uint64_t>(model_.vector_width)) {
    return Invalid("vector_capacity is " + std::to_string(c.vector_capacity) + " but the model's vectors have " +
                   std::to_string(model_.vector_width) + " floats; give more memory.");
  }
  if (c.sampling->n != 1 || c.guided != 0 || c.num_prompt_logprobs != -1 || c.sampling->best_of > 1 ||
      c.sampling->beam_width != 0) {
    return Invalid(
        "A model that gives vectors draws no tokens: leave n at 1, guided, best_of and beam_width at 0 and "
        "num_prompt_logprobs at -1.");
  }
  return Status::Ok();
}

// Whether what a request says of output that it already has can be.
Status Engine::CheckResumed(const llmc_request& c) const {
  if (c.num_output_tokens == 0 && c.output_index == 0) return Status::Ok();
  if (c.num_output_tokens >= c.num_prompt_tokens) {
    return Invalid("num_output_tokens is " + std::to_string(c.num_output_tokens) + " of " +
                   std::to_string(c.num_prompt_tokens) + " prompt_token_ids; leave at least one for the prompt.");
  }
  if (c.num_output_tokens >= c.sampling->max_tokens) {
    return Invalid("num_output_tokens is " + std::to_string(c.num_output_tokens) + " but max_tokens is " +
                   std::to_string(c.sampling->max_tokens) + "; nothing is left to draw.");
  }
  if (c.sampling->n != 1 || c.sampling->best_of > 1 || c.sampling->beam_width != 0 || c.num_prompt_logprobs != -1 ||
      model_.vector_width > 0) {
    return Invalid(
        "A request with num_output_tokens or output_index is one continuation of a model that writes text: leave n at "
        "1, best_of and beam_width at 0 and num_prompt_logprobs at -1.");
  }
  return Status::Ok();
}

// mutex_ is held.
void Engine::AskForFirstMasks(Request* r) {
  for (uint32_t i = 0; i < r->params.n; ++i) {
    events_.push_back(MakeEvent(*r->sequences[0], i, LLMC_EVENT_NEEDS_MASK));
  }
  r->asked = true;
  num_asked_ += r->params.n;
}

// Who started or ended makes room for those behind. mutex_ is held.
void Engine::CountAsked() {
  const auto turn = [](Request* r) { return std::tuple(r->sequences[0]->priority, r->id, r); };
  for (Request* r : started_) {
    // Its prompt is computed already, before its turn to be asked for came.
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

Status Engine::SetTokenMasks(uint64_t id, uint32_t output_index, const uint32_t* words, uint64_t num_words,
                             const int32_t* guesses, uint64_t num_guesses) {
  const uint64_t most = (static_cast<uint64_t>(model_.vocab_size) + 31) / 32;
  if (num_words < 1 || num_words > most) {
    return Invalid("num_words is " + std::to_string(num_words) + "; use 1 to " + std::to_string(most) +
                   ", one bit for each token of the vocabulary.");
  }
  if (num_guesses > LLMC_MAX_SPECULATE_TOKENS) {
    return Invalid("num_guesses is " + std::to_string(num_guesses) + "; use 0 to " +
                   std::to_string(LLMC_MAX_SPECULATE_TOKENS) + ".");
  }
  for (uint64_t i = 0; i < num_guesses; ++i) {
    if (guesses[i] < 0 || guesses[i] >= model_.vocab_size) {
      return Invalid("guesses[" + std::to_string(i) + "] is " + std::to_string(guesses[i]) + "; use 0 to " +
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
  if (!r->guided) return Invalid("Request " + std::to_string(id) + " is not guided; submit it with guided = 1.");
  if (output_index >= r->masks.size()) {
    return Invalid("output_index is " + std::to_string(output_index) + " but the request has n = " +
                   std::to_string(r->masks.size()) + "; use 0 to " + std::to_string(r->masks.size() - 1) + ".");
  }
  TokenMask& mask = r->masks[output_index];
  const std::string name = "Continuation " + std::to_string(output_index) + " of request " + std::to_string(id);
  if (mask.state == TokenMask::State::kDone) {
    return Status::Error(LLMC_ERR_NOT_FOUND, name + " has finished; it needs no mask.");
  }
  if (mask.state == TokenMask::State::kTaken) {
    return Invalid(name + " is taking a token by its last mask; set the next one after that token's event.");
  }
  mask_inbox_.push_back(r);  // first: when memory runs out below, a look at the old mask does no harm
  mask.guesses.assign(guesses, guesses + num_guesses);
  mask.words.assign(words, words + (num_guesses + 1) * num_words);
  mask.num_words = static_cast<uint32_t>(num_words);
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

uint32_t Engine::Ready() const {
  const bool work = runnable_ || !inbox_.empty() || !cancel_inbox_.empty() || !mask_inbox_.empty() ||
                    (next_deadline_ns_ != 0 && next_deadline_ns_ <= MonotonicNs());
  uint32_t ready = 0;
  if (!events_.empty()) ready |= LLMC_READY_EVENTS;
  if (work) ready |= LLMC_READY_WORK;
  return ready;
}

uint32_t Engine::Wait(uint64_t timeout_ns) {
  constexpr uint64_t kForever = INT64_MAX;
  const uint64_t begin = MonotonicNs();
  const uint64_t end = timeout_ns < kForever - begin ? begin + timeout_ns : kForever;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    const uint32_t ready = Ready();
    if (ready != 0 || MonotonicNs() >= end) return ready;
    const uint64_t until = std::min(end, next_deadline_ns_ ? next_deadline_ns_ : kForever);
    if (until >= kForever) {
      changed_.wait(lock);
    } else {
      changed_.wait_until(lock,
                          std::chrono::steady_clock::time_point(std::chrono::nanoseconds(static_cast<int64_t>(until))));
    }
  }
}

uint64_t Engine::Poll(llmc_event* events, uint64_t capacity) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (capacity == 0) return 0;
  const uint64_t count = std::min<uint64_t>(capacity, events_.size());
  WriteArray(events_, count, events);
  events_.erase(events_.begin(), events_.begin() + static_cast<std::ptrdiff_t>(count));
  return count;
}

llmc_engine_stats Engine::Stats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

std::vector<DeviceStat> Engine::DeviceStats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return device_stats_;
}

std::vector<llmc_graph_stats> Engine::GraphStats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return graph_stats_;
}

std::vector<llmc_eviction_count> Engine::Evictions() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return evictions_;
}

std::vector<llmc_bucket_miss> Engine::BucketMisses() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return bucket_misses_;
}

std::vector<llmc_request_mark> Engine::TakeRequestMarks(bool* complete) {
  std::vector<llmc_request_mark> marks;
  marks.reserve(RequestMarks::kMost);
  marks_.Take(&marks, complete);
  return marks;
}

std::vector<llmc_step_shape> Engine::TakeStepShapes(uint64_t* lost) {
  std::vector<llmc_step_shape> shapes;
  shapes.reserve(StepShapes::kMost);
  std::lock_guard<std::mutex> lock(mutex_);
  step_shapes_.Take(&shapes, lost);
  return shapes;
}

Status Engine::CheckIntegrity() const {
  std::lock_guard<std::mutex> step_lock(step_mutex_);
  LLMC_RETURN_IF_ERROR(scheduler_.CheckIntegrity());
  std::lock_guard<std::mutex> lock(mutex_);
  uint64_t active = 0;
  for (const auto& [id, request] : live_) {
    for (const auto& s : request->sequences) {
      active += s->state == Sequence::State::kRunning || s->state == Sequence::State::kWaiting;
    }
  }
  if (active != scheduler_.num_running() + scheduler_.num_waiting()) {
    return Status::Error(LLMC_ERR_INTERNAL, std::to_string(active) + " sequences are active but the scheduler holds " +
                                                std::to_string(scheduler_.num_running() + scheduler_.num_waiting()) +
                                                ".");
  }
  std::unordered_map<uint64_t, uint32_t> users;
  for (const auto& [id, request] : live_) {
    if (request->adapter != 0) ++users[request->adapter];
  }
  for (const auto& [id, adapter] : adapters_) {
    if (adapter.num_requests != users[id] || (adapter.unloaded && adapter.num_requests == 0)) {
      return Status::Error(LLMC_ERR_INTERNAL, "Adapter " + std::to_string(id) + " is kept for " +
                                                  std::to_string(adapter.num_requests) + " requests, not for " +
                                                  std::to_string(users[id]) + ".");
    }
  }
  for (const auto& [id, request] : live_) {
    // A mask set since the last step is not known to the scheduler yet.
    if (std::find(mask_inbox_.begin(), mask_inbox_.end(), request.get()) != mask_inbox_.end()) continue;
    for (const auto& s : request->sequences) {
      if (!s->finished && s->held != IsHeld(*request, *s)) {
        return Status::Error(LLMC_ERR_INTERNAL, "Request " + std::to_string(id) + " is held by mistake, or not held.");
      }
    }
  }
  return Status::Ok();
}

// ---- the loop --------------------------------------------------------------------------------------------------

Status Engine::Step(bool* progressed) {
  std::lock_guard<std::mutex> step_lock(step_mutex_);
  try {
    if (out_of_memory_) FailAfterOutOfMemory();
    return StepOnce(progressed);
  } catch (const std::bad_alloc&) {
    Scheduler::DropGuesses(&plan_);
    Forget();
    FailAfterOutOfMemory();
    throw;
  }
}

Status Engine::StepOnce(bool* progressed) {
  const uint64_t begin = MonotonicNs();
  TakeInbox(begin);
  const uint64_t preemptions = scheduler_.num_preemptions();
  scheduler_.Schedule(&plan_);
  const uint64_t scheduled = MonotonicNs();
  counters_.schedule_ns += scheduled - begin;
  scheduled_ns_ = scheduled;
  if (marks_.on()) MarkPreempted();
  for (Sequence* s : plan_.misses) FailRequest(s->request, MissOf(*s));
  // A missed request may have had other sequences in the plan: then this plan is void and the next step plans anew.
  const bool run = !plan_.items.empty() && plan_.misses.empty();
  *progressed = run || !new_events_.empty() || scheduler_.num_preemptions() != preemptions;
  Status status;
  if (run) {
    TakeMasks();
    status = speculator_.Plan(&scheduler_, &plan_);
  }
  const uint64_t output_tokens = counters_.output_tokens;
  if (run || !plan_.copies.empty() || !plan_.saves.empty() || !plan_.loads.empty()) {
    Prepare();
    if (run && status.ok()) status = device_->BeforeStep();
    const uint64_t replay = MonotonicNs();
    counters_.prepare_ns += replay - scheduled;
    const float* logits = nullptr;
    if (status.ok()) status = Run(run, &logits);
    const uint64_t sample = MonotonicNs();
    replay_ns_ = sample - replay;
    counters_.replay_ns += replay_ns_;
    if (!status.ok()) {
      Scheduler::DropGuesses(&plan_);
      FailAll(status);
    } else if (run) {
      scheduler_.Commit(plan_);
      CountPrefill();
      if (marks_.on()) MarkChunks();
      if (model_.vector_width > 0) {
        GiveVectors(logits);
      } else {
        if (!device_->samples()) host_sampler_.Draw(device_.get(), logits, tasks_, &outcomes_);
        Scheduler::DropGuesses(&plan_);
        Postprocess();
      }
      counters_.sample_ns += MonotonicNs() - sample;
    }
  }
  const uint64_t took = MonotonicNs() - begin;
  if (run && status.ok()) speculator_.Learn(counters_.output_tokens - output_tokens, took);
  CountTime(run && status.ok(), took);
  Publish(run && status.ok(), *progressed);
  return status;
}

void Engine::MarkPreempted() {
  for (const Sequence* s : plan_.preempted) {
    marks_.Add({0, LLMC_MARK_PREEMPTED, s->request->id, s->output_index, 0, 0, 0, scheduled_ns_, scheduled_ns_});
  }
}

// Before the draws: what they add would make the last row of a prompt look like a decode.
void Engine::MarkChunks() {
  const uint64_t now = MonotonicNs();
  for (const StepItem& item : plan_.items) {
    const Sequence& s = *item.sequence;
    if (item.start >= s.num_prompt && item.count - item.num_guesses == 1) continue;
    marks_.Add(
        {0, LLMC_MARK_PREFILL, s.request->id, s.output_index, plan_.graph, item.start, item.count, scheduled_ns_, now});
  }
}

void Engine::CountTime(bool stepped, uint64_t step_ns) {
  llmc_engine_stats& c = counters_;
  c.step_ns += step_ns;
  if (!stepped) return;
  const ReplayTime time = device_->last_replay();
  c.kernel_ns += time.kernel_ns;
  c.barrier_ns += time.barrier_ns;
  if (plan_.prefill) return;
  c.decode_step_ns += step_ns;
  c.decode_kernel_ns += time.kernel_ns;
  c.decode_barrier_ns += time.barrier_ns;
}

void Engine::TakeArrivals() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    arrived_.swap(inbox_);
  }
  for (Request* r : arrived_) {
    scheduler_.Add(r->sequences[0].get());
    if (r->deadline_ns != 0) deadlines_.insert({r->deadline_ns, r});
  }
  arrived_.clear();
}

void Engine::TakeInbox(uint64_t now) {
  {
    // Before arrivals: then whatever was cancelled has arrived.
    std::lock_guard<std::mutex> lock(mutex_);
    cancelled_.swap(cancel_inbox_);
    for (Request* r : mask_inbox_) {
      for (const auto& s : r->sequences) s->held = IsHeld(*r, *s);
    }
    mask_inbox_.clear();
  }
  TakeArrivals();
  for (Request* r : cancelled_) EndRequest(r, LLMC_FINISH_CANCELLED);
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    EndRequest(deadlines_.begin()->second, LLMC_FINISH_TIMEOUT);
  }
  cancelled_.clear();
}

// The first token of a request is drawn for all its continuations at once, so all their masks must be there.
bool Engine::IsHeld(const Request& r, const Sequence& s) {
  const auto missing = [](const TokenMask& mask) { return mask.state != TokenMask::State::kReady; };
  if (r.beams != nullptr) return r.beams->waits(s);
  if (!r.guided) return false;
  return r.forked ? missing(r.masks[s.output_index]) : std::any_of(r.masks.begin(), r.masks.end(), missing);
}

// From here on the masks of this step's tokens cannot be replaced.
void Engine::TakeMasks() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const StepItem& item : plan_.items) {
    Request* r = item.sequence->request;
    if (!item.sample || !r->guided) continue;
    for (uint32_t i = 0; i < r->masks.size(); ++i) {
      if (!r->forked || i == item.sequence->output_index) r->masks[i].state = TokenMask::State::kTaken;
    }
  }
}

// Packs the plan into the device's input arrays.
void Engine::Prepare() {
  const uint32_t block_size = static_cast<uint32_t>(model_.block_size);
  StepBatch& b = batch_;
  b.graph = plan_.graph;
  b.num_tokens = plan_.load.tokens;
  b.num_seqs = plan_.load.seqs;
  b.num_samples = plan_.load.samples;
  b.block_table_stride = plan_.load.blocks;
  b.input_ids.clear();
  b.positions.clear();
  b.slot_mapping.clear();
  b.context_lens.clear();
  b.query_start.assign(1, 0);
  b.sample_index.clear();
  b.adapter_slots.clear();
  b.block_tables.assign(static_cast<size_t>(b.num_seqs) * b.block_table_stride, 0);
  int32_t* table = b.block_tables.data();
  for (const StepItem& item : plan_.items) {
    const Sequence& s = *item.sequence;
    const uint32_t end = item.start + item.count;
    for (uint32_t p = item.start; p < end; ++p) {
      b.input_ids.push_back(s.tokens[p]);
      b.positions.push_back(static_cast<int32_t>(p));
      b.slot_mapping.push_back(static_cast<int32_t>(s.blocks[p / block_size] * block_size + p % block_size));
    }
    std::copy_n(s.blocks.begin(), (end + block_size - 1) / block_size, table);
    table += b.block_table_stride;
    if (!model_.adapters.empty()) b.adapter_slots.push_back(s.request->adapter_slot);
    b.context_lens.push_back(static_cast<int32_t>(end));
    b.query_start.push_back(static_cast<int32_t>(b.input_ids.size()));
    const int32_t row = static_cast<int32_t>(b.input_ids.size()) - static_cast<int32_t>(end);  // of position 0
    for (uint32_t i = 0; i < item.num_scores; ++i) {
      b.sample_index.push_back(row + static_cast<int32_t>(item.first_score + i));
    }
    if (!item.sample) continue;
    for (uint32_t p = end - 1 - item.num_guesses; p < end; ++p) {
      b.sample_index.push_back(row + static_cast<int32_t>(p));
    }
  }
}

// What computing a token again costs: a running mean of prefill steps.
void Engine::CountPrefill() {
  if (!plan_.prefill || !scheduler_.swap()->open()) return;
  const uint64_t ns = replay_ns_ / std::max(plan_.load.tokens, 1u);
  token_ns_ = token_ns_ == 0 ? ns : (7 * token_ns_ + ns) / 8;
  scheduler_.swap()->SetCosts(swap_block_ns_, token_ns_);
}

Status Engine::Run(bool replay, const float** logits) {
  for (const StepPlan::Copy& save : plan_.saves) LLMC_RETURN_IF_ERROR(device_->SaveBlock(save.from, save.to));
  for (const StepPlan::Copy& copy : plan_.copies) LLMC_RETURN_IF_ERROR(device_->CopyBlock(copy.from, copy.to));
  for (const StepPlan::Copy& load : plan_.loads) LLMC_RETURN_IF_ERROR(device_->LoadBlock(load.from, load.to));
  if (!replay) return Status::Ok();
  Fence fence = 0;
  LLMC_RETURN_IF_ERROR(device_->Enqueue(batch_, &fence));
  try {
    if (model_.vector_width == 0) ListTasks();
    // What changes nothing that the step uses is done while it runs; cancels and masks wait for its end.
    if (device_->overlaps()) TakeArrivals();
  } catch (...) {
    // Nothing may be on its way when a step is given up, whatever became of it.
    static_cast<void>(device_->Wait(fence, logits).ok());
    throw;
  }
  const bool draws = device_->samples() && model_.vector_width == 0;
  return draws ? device_->Sample(fence, tasks_, &outcomes_) : device_->Wait(fence, logits);
}

// What is drawn of the step's rows, in the order of its items: the logprobs of a prompt's tokens first, then a token, or
// n of them where a prompt with n > 1 is done.
void Engine::ListTasks() {
  tasks_.clear();
  guessed_.clear();
  uint32_t row = 0;
  for (const StepItem& item : plan_.items) {
    const Sequence& s = *item.sequence;
    const Request& r = *s.request;
    for (uint32_t i = 0; i < item.num_scores; ++i) {
      SampleTask score;
      score.row = row++;
      score.position = item.first_score + i + 1;
      score.token = s.tokens[score.position];
      score.num_top = static_cast<uint32_t>(r.num_prompt_logprobs);
      tasks_.push_back(score);
      guessed_.push_back(kNoGuess);
    }
    if (!item.sample) continue;
    if (r.beams != nullptr) {
      SampleTask best;
      best.row = row++;
      best.position = static_cast<uint32_t>(s.tokens.size());
      best.num_best = r.beams->search.num_best();
      tasks_.push_back(best);
      guessed_.push_back(kNoGuess);
      continue;
    }
    const uint32_t first = r.forked ? s.output_index : 0, end = r.forked ? first + 1 : r.params.n;
    for (uint32_t output_index = first; output_index < end; ++output_index) {
      SampleTask draw;
      draw.row = row;
      draw.params = &r.params;
      draw.context = {s.tokens.data(), static_cast<uint32_t>(s.tokens.size()), s.num_prompt,
                      r.first_output + output_index};
      if (r.guided) {
        const TokenMask& mask = r.masks[output_index];
        draw.context.mask = mask.words.data();
        draw.context.num_mask_words = mask.num_words;
      }
      tasks_.push_back(draw);
      guessed_.push_back(kNoGuess);
    }
    ++row;
    if (item.num_guesses == 0) continue;
    // What comes behind the guesses is drawn as if they were right: the step that would draw it has the same text.
    const uint32_t known = item.start + item.count - item.num_guesses;
    tasks_.back().context.num_tokens = known;
    for (uint32_t i = 0; i < item.num_guesses; ++i, ++row) {
      SampleTask draw = tasks_.back();
      draw.row = row;
      draw.context.num_tokens = known + i + 1;
      if (r.guided) draw.context.mask += draw.context.num_mask_words;
      tasks_.push_back(draw);
      guessed_.push_back(s.tokens[known + i]);
    }
  }
  outcomes_.resize(tasks_.size());
}

// Whose each task is, in their order. A prompt that is done has n sequences from now on.
void Engine::NameOwners() {
  owners_.clear();
  for (const StepItem& item : plan_.items) {
    Request* r = item.sequence->request;
    if (r->first_scheduled_ns == 0) {
      r->first_scheduled_ns = scheduled_ns_;
      if (r->guided) started_.push_back(r);
    }
    owners_.insert(owners_.end(), item.num_scores, item.sequence);
    if (!item.sample) continue;
    if (r->forked) {
      owners_.insert(owners_.end(), 1 + item.num_guesses, item.sequence);
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
    scheduler_.Fork(*parent, child.get());
    r->sequences.push_back(std::move(child));
  }
}

// Whether a task draws behind a guess, which the task before it drew.
bool Engine::ComesTrue(std::size_t task) const {
  return task < tasks_.size() && guessed_[task] != kNoGuess && outcomes_[task - 1].result.token == guessed_[task];
}

void Engine::Postprocess() {
  NameOwners();
  // At most TOKEN and FINISHED or NEEDS_MASK each: a token that is appended is told.
  MakeRoom(&new_events_, 2 * tasks_.size());
  bool guessed_right = true;
  for (size_t i = 0; i < tasks_.size(); ++i) {
    const SampleTask& task = tasks_[i];
    const SampleOutcome& outcome = outcomes_[i];
    Sequence* s = owners_[i];
    guessed_right = guessed_[i] == kNoGuess || (guessed_right && ComesTrue(i));
    if (s->state == Sequence::State::kDone) continue;  // a sibling failed the request, or the last token ended it
    if (!guessed_right) continue;
    if (guessed_[i] != kNoGuess) {
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
      // Its keys and values may not be finite either: nobody may begin with them.
      if (outcome.status.code == LLMC_ERR_NOT_FINITE) {
        for (const auto& one : s->request->sequences) scheduler_.Forget(*one);
      }
      FailRequest(s->request, outcome.status);
    }
  }
  bool speculative = false;
  for (const StepItem& item : plan_.items) {
    if (item.num_guesses == 0) continue;
    speculative = true;
    counters_.drafted_tokens += item.num_guesses;
    scheduler_.TrimBlocks(item.sequence);
  }
  counters_.num_speculative_steps += speculative;
}

// A prompt that is done has its vector, and ends. rows: of those that end in this step, in the order of its items.
void Engine::GiveVectors(const float* rows) {
  const size_t width = static_cast<size_t>(model_.vector_width);
  MakeRoom(&new_events_, plan_.items.size());
  for (const StepItem& item : plan_.items) {
    Request* r = item.sequence->request;
    if (r->first_scheduled_ns == 0) r->first_scheduled_ns = scheduled_ns_;
    if (!item.sample) continue;
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
  const SamplingParams& params = s->request->params;
  const bool stop = (!params.ignore_eos && Contains(model_.eos_token_ids, sample.token)) ||
                    Contains(params.stop_token_ids, sample.token);
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

// ---- ends ------------------------------------------------------------------------------------------------------

// Here and below what may run out of memory comes before what it is about: one event each, whatever happens.
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

// Ends every unfinished continuation, with one event each.
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

Status Engine::MissOf(const Sequence& s) const {
  if (options_.miss_policy != MissPolicy::kError) {
    return Status::Error(LLMC_ERR_BUCKET_MISS, "No graph holds a sequence of " + std::to_string(s.tokens.size()) +
                                                   " tokens; compile the artifact with larger buckets.");
  }
  const BucketMiss& miss = plan_.miss;
  const bool decode = miss.phase == Phase::kDecode;
  const uint32_t context = miss.blocks * static_cast<uint32_t>(model_.block_size);
  return Status::Error(LLMC_ERR_BUCKET_MISS, "No " + std::string(decode ? "decode" : "prefill") +
                                                 " graph that is on holds " + std::to_string(miss.seqs) +
                                                 " sequences, the longest of up to " + std::to_string(context) +
                                                 " tokens, and misses are errors; add bucket " +
                                                 WantedFor(miss, model_).Name() + " or allow other graphs.");
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

// A step that ran out of memory may have left anything half made: scheduler and blocks begin anew, and every request,
// submitted or running, is about to fail. Allocates nothing.
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
  runnable_ = true;  // until all of them have their event
  changed_.notify_all();
}

// May itself run out of memory; what has its event then keeps it, and the next step goes on.
void Engine::FailAfterOutOfMemory() {
  FailAll(Status::Error(LLMC_ERR_OUT_OF_MEMORY, "Memory ran out in a step; use fewer sequences or a smaller KV pool."));
  out_of_memory_ = false;
  Publish(false, false);
}

llmc_event Engine::MakeEvent(const Sequence& s, uint32_t output_index, uint32_t kind) const {
  llmc_event event;
  std::memset(&event, 0, sizeof(event));
  event.kind = kind;
  event.request_id = s.request->id;
  event.output_index = output_index;
  event.token_id = -1;
  event.num_prompt_tokens = s.num_prompt;
  event.num_cached_tokens = std::min(s.num_cached, s.num_prompt);  // output that it came with may be cached, too
  event.num_output_tokens = static_cast<uint32_t>(s.tokens.size()) - s.num_prompt;
  event.time_ns = MonotonicNs();
  if (kind == LLMC_EVENT_FINISHED || kind == LLMC_EVENT_FAILED) {
    event.arrival_ns = s.request->arrival_ns;
    event.first_scheduled_ns = s.request->first_scheduled_ns;
    event.first_token_ns = s.request->first_token_ns;
  }
  return event;
}

void Engine::SetSample(const SampleResult& sample, llmc_event* event) {
  event->token_id = sample.token;
  event->logprob = sample.logprob;
  event->rank = sample.rank;
  event->num_top = sample.num_top;
  std::copy_n(sample.top_token_ids, sample.num_top, event->top_token_ids);
  std::copy_n(sample.top_logprobs, sample.num_top, event->top_logprobs);
}

// The bucket that a shape wants is named once, by the graphs there are when it first misses. mutex_ is held.
void Engine::CopyMisses() {
  const std::vector<BucketMiss>& all = scheduler_.bucket_misses();
  for (std::size_t i = 0; i < all.size(); ++i) {
    const BucketMiss& m = all[i];
    if (i == bucket_misses_.size()) {
      const WantedBucket wanted = WantedFor(m, model_);
      bucket_misses_.push_back(
          {0, static_cast<uint32_t>(m.phase), m.seqs, m.tokens, m.blocks, 0, 0, m.graph, 0, wanted.batch, wanted.seq});
    }
    bucket_misses_[i].count = m.count;
  }
}

// Makes the step visible to other threads: events, statistics, the end of requests.
void Engine::Publish(bool stepped, bool progressed) {
  llmc_engine_stats& c = counters_;
  if (stepped) {
    const GraphShape& g = model_.graphs[plan_.graph];
    ++c.num_steps;
    ++(plan_.prefill ? c.num_prefill_steps : c.num_decode_steps);
    c.num_mixed_steps += plan_.mixed;
    c.scheduled_tokens += plan_.load.tokens;
    c.padded_tokens += g.max_tokens - plan_.load.tokens;
  }
  c.num_running = scheduler_.num_running();
  c.num_blocks = blocks_.num_usable();
  c.num_free_blocks = blocks_.num_free();
  c.num_cached_blocks = blocks_.num_cached();
  device_->GetStats(&new_device_stats_);
  c.num_preemptions = scheduler_.num_preemptions();
  c.num_evictions = scheduler_.num_evictions();
  c.num_promotions = scheduler_.num_promotions();
  c.num_bucket_misses = scheduler_.num_bucket_misses();
  c.num_missed_shapes = scheduler_.bucket_misses().size();
  c.prefix_query_tokens = scheduler_.num_query_tokens();
  c.prefix_hit_tokens = scheduler_.num_hit_tokens();

  std::lock_guard<std::mutex> lock(mutex_);
  if (stepped) {
    llmc_graph_stats& g = graph_stats_[plan_.graph];
    ++g.replays;
    g.tokens += plan_.load.tokens;
    g.padded_tokens += model_.graphs[plan_.graph].max_tokens - plan_.load.tokens;
    g.replay_ns += replay_ns_;
    const Phase carried = plan_.mixed ? Phase::kMixed : plan_.prefill ? Phase::kPrefill : Phase::kDecode;
    const StepLoad& load = plan_.load;
    step_shapes_.Count(
        {0, static_cast<uint32_t>(carried), plan_.graph, load.seqs, load.tokens, load.samples, load.blocks, 0, 0, 0, 0},
        replay_ns_);
  }
  if (stats_.num_bucket_misses != c.num_bucket_misses) CopyMisses();
  if (stats_.num_evictions != c.num_evictions) {
    evictions_.clear();
    for (const EvictionCount& one : scheduler_.evictions()) evictions_.push_back({0, one.priority, one.count});
  }
  for (MaskUpdate& update : mask_updates_) {
    update.mask->state = update.state;
    update.mask->offered.swap(update.offered);
  }
  mask_updates_.clear();
  events_.insert(events_.end(), new_events_.begin(), new_events_.end());
  new_events_.clear();
  CountAsked();
  if (!ended_.empty()) {
    // A cancel or a mask may still name a request that ends now.
    for (std::vector<Request*>* inbox : {&cancel_inbox_, &mask_inbox_}) {
      inbox->erase(std::remove_if(inbox->begin(), inbox->end(), [](Request* r) { return r->ended; }), inbox->end());
    }
    for (Request* r : ended_) {
      ReleaseAdapter(*r);
      live_.erase(r->id);
    }
    ended_.clear();
  }
  num_queued_ = static_cast<uint32_t>(inbox_.size()) + scheduler_.num_unstarted();
  c.num_waiting = static_cast<uint32_t>(inbox_.size()) + scheduler_.num_waiting();
  stats_ = c;
  device_stats_.swap(new_device_stats_);
  runnable_ = progressed && scheduler_.num_running() + scheduler_.num_waiting() > 0;
  next_deadline_ns_ = deadlines_.empty() ? 0 : deadlines_.begin()->first;
  changed_.notify_all();
}

}  // namespace llmc
