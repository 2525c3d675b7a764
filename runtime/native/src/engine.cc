#include "engine.h"

#include <algorithm>
#include <cstring>

#include "clock.h"

namespace llmc {
namespace {

bool Contains(const std::vector<int32_t>& ids, int32_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

Status Invalid(std::string message) { return Status::Error(LLMC_ERR_INVALID_ARGUMENT, std::move(message)); }

}  // namespace

Status Engine::Create(std::unique_ptr<Device> device, const EngineOptions& options, std::unique_ptr<Engine>* out) {
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
    return Invalid("The KV pool has no block besides the dummy block; raise num_blocks or kv_bytes.");
  }
  out->reset(new Engine(std::move(device), options));
  return Status::Ok();
}

Engine::Engine(std::unique_ptr<Device> device, const EngineOptions& options)
    : device_(std::move(device)),
      model_(device_->model()),
      options_(options),
      max_length_(static_cast<uint32_t>(std::min<uint64_t>(
          model_.max_model_len, static_cast<uint64_t>(device_->num_blocks() - 1) * model_.block_size))),
      blocks_(device_->num_blocks(), static_cast<uint32_t>(model_.block_size), options.prefix_cache),
      scheduler_(model_,
                 {options.max_num_seqs ? options.max_num_seqs : static_cast<uint32_t>(model_.max_num_seqs),
                  options.max_tokens_per_step, options.error_on_miss},
                 &blocks_),
      sampler_(model_.vocab_size, model_.eos_token_ids),
      graph_replays_(model_.graphs.size()),
      graph_tokens_(model_.graphs.size()) {
  if (options_.max_waiting == 0) options_.max_waiting = 65536;
  std::memset(&counters_, 0, sizeof(counters_));
  Publish(false);
}

// ---- from any thread -------------------------------------------------------------------------------------------

Status Engine::Submit(const llmc_request& c, uint64_t* id) {
  if (c.num_prompt_tokens == 0 || c.prompt_token_ids == nullptr) {
    return Invalid("The prompt is empty; give at least one token id.");
  }
  if (c.num_prompt_tokens > max_length_ - 1) {
    const bool pool = max_length_ < static_cast<uint32_t>(model_.max_model_len);
    return Invalid("The prompt has " + std::to_string(c.num_prompt_tokens) + " tokens but at most " +
                   std::to_string(max_length_ - 1) + " fit " +
                   (pool ? "the KV pool; shorten it or raise num_blocks or kv_bytes."
                         : "max_model_len with one output token; shorten it."));
  }
  for (uint64_t i = 0; i < c.num_prompt_tokens; ++i) {
    if (c.prompt_token_ids[i] < 0 || c.prompt_token_ids[i] >= model_.vocab_size) {
      return Invalid("prompt_token_ids[" + std::to_string(i) + "] is " + std::to_string(c.prompt_token_ids[i]) +
                     "; use 0 to " + std::to_string(model_.vocab_size - 1) + ".");
    }
  }
  auto request = std::make_unique<Request>();
  LLMC_RETURN_IF_ERROR(MakeSamplingParams(c.sampling, model_.vocab_size, 0, &request->params));
  const uint32_t num_prompt = static_cast<uint32_t>(c.num_prompt_tokens);
  request->max_length = static_cast<uint32_t>(
      std::min<uint64_t>(max_length_, static_cast<uint64_t>(num_prompt) + request->params.max_tokens));
  request->num_unfinished = request->params.n;
  auto sequence = std::make_unique<Sequence>();
  sequence->request = request.get();
  sequence->priority = c.priority;
  sequence->num_prompt = num_prompt;
  sequence->tokens.reserve(request->max_length);
  sequence->tokens.assign(c.prompt_token_ids, c.prompt_token_ids + num_prompt);
  request->sequences.push_back(std::move(sequence));

  std::lock_guard<std::mutex> lock(mutex_);
  if (num_queued_ >= options_.max_waiting) {
    return Status::Error(LLMC_ERR_QUEUE_FULL, std::to_string(num_queued_) +
                                                  " requests are waiting, the most allowed; retry later or raise "
                                                  "max_waiting.");
  }
  Request* r = request.get();
  r->id = next_id_;
  r->sequences[0]->arrival = r->id;
  if (!c.sampling.has_seed) {
    // Spread the engine's seed over requests; the sampler mixes it.
    r->params.seed = options_.seed + r->id * 0x9e3779b97f4a7c15ull;
  }
  inbox_.push_back(r);
  live_.emplace(r->id, std::move(request));
  ++next_id_;
  ++num_queued_;
  ++stats_.num_waiting;
  *id = r->id;
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
  return Status::Ok();
}

uint64_t Engine::Poll(llmc_event* events, uint64_t capacity) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (capacity == 0) return 0;
  // The caller's struct may be older and smaller, or newer and larger, than ours.
  const uint32_t stride = events[0].struct_size;
  uint64_t count = std::min<uint64_t>(capacity, events_.size());
  for (uint64_t i = 0; i < count; ++i) {
    llmc_event event = events_.front();
    event.struct_size = stride;
    std::memcpy(reinterpret_cast<char*>(events) + i * stride, &event, std::min<size_t>(stride, sizeof(event)));
    events_.pop_front();
  }
  return count;
}

llmc_engine_stats Engine::Stats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

void Engine::GraphUse(uint64_t* replays, uint64_t* tokens) const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::copy(graph_replays_.begin(), graph_replays_.end(), replays);
  std::copy(graph_tokens_.begin(), graph_tokens_.end(), tokens);
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
  return Status::Ok();
}

// ---- the loop --------------------------------------------------------------------------------------------------

Status Engine::Step(bool* progressed) {
  std::lock_guard<std::mutex> step_lock(step_mutex_);
  const uint64_t begin = MonotonicNs();
  TakeInbox();
  scheduler_.Schedule(&plan_);
  const uint64_t scheduled = MonotonicNs();
  counters_.schedule_ns += scheduled - begin;
  for (Sequence* s : plan_.misses) EndRequest(s->request, LLMC_EVENT_FAILED, LLMC_FINISH_ERROR, LLMC_ERR_BUCKET_MISS);
  // A missed request may have had other sequences in the plan: then this plan is void and the next step plans anew.
  const bool run = !plan_.items.empty() && plan_.misses.empty();
  *progressed = run || !new_events_.empty();
  Status status;
  if (run || !plan_.copies.empty()) {
    Prepare();
    const uint64_t replay = MonotonicNs();
    counters_.prepare_ns += replay - scheduled;
    const float* logits = nullptr;
    status = Run(run, &logits);
    const uint64_t sample = MonotonicNs();
    counters_.replay_ns += sample - replay;
    if (!status.ok()) {
      FailAll(status.code);
    } else if (run) {
      scheduler_.Commit(plan_);
      Sample(logits);
      Postprocess();
      counters_.sample_ns += MonotonicNs() - sample;
    }
  }
  CountTime(run && status.ok(), MonotonicNs() - begin);
  Publish(run && status.ok());
  return status;
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

void Engine::TakeInbox() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    arrived_.swap(inbox_);
    cancelled_.swap(cancel_inbox_);
  }
  for (Request* r : arrived_) scheduler_.Add(r->sequences[0].get());
  for (Request* r : cancelled_) EndRequest(r, LLMC_EVENT_FINISHED, LLMC_FINISH_CANCELLED, LLMC_OK);
  arrived_.clear();
  cancelled_.clear();
}

// Packs the plan into the device's input arrays.
void Engine::Prepare() {
  const uint32_t block_size = static_cast<uint32_t>(model_.block_size);
  StepBatch& b = batch_;
  b.graph = plan_.graph;
  b.num_tokens = plan_.num_tokens;
  b.num_seqs = static_cast<uint32_t>(plan_.items.size());
  b.num_samples = plan_.num_samples;
  b.block_table_stride = plan_.max_blocks;
  b.input_ids.clear();
  b.positions.clear();
  b.slot_mapping.clear();
  b.context_lens.clear();
  b.query_start.assign(1, 0);
  b.sample_index.clear();
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
    b.context_lens.push_back(static_cast<int32_t>(end));
    b.query_start.push_back(static_cast<int32_t>(b.input_ids.size()));
    if (item.sample) b.sample_index.push_back(static_cast<int32_t>(b.input_ids.size()) - 1);
  }
}

Status Engine::Run(bool replay, const float** logits) {
  for (const StepPlan::Copy& copy : plan_.copies) LLMC_RETURN_IF_ERROR(device_->CopyBlock(copy.from, copy.to));
  return replay ? device_->Run(batch_, logits) : Status::Ok();
}

// One token for every sequence whose last token was computed; n of them when a prompt with n > 1 is done.
void Engine::Sample(const float* logits) {
  sampled_.clear();
  uint32_t row = 0;
  for (const StepItem& item : plan_.items) {
    if (!item.sample) continue;
    Sequence* s = item.sequence;
    Request* r = s->request;
    const bool first = !r->forked;
    if (first) Fork(s);
    const size_t count = first ? r->sequences.size() : 1;
    for (size_t i = 0; i < count; ++i) {
      Sequence* one = first ? r->sequences[i].get() : s;
      sampled_.push_back({one, {}, {}});
      Sampled& out = sampled_.back();
      const SampleContext context{one->tokens.data(), static_cast<uint32_t>(one->tokens.size()), one->num_prompt,
                                  one->output_index};
      out.status = sampler_.Sample(logits + static_cast<size_t>(row) * model_.vocab_size, r->params, context,
                                   &out.result);
    }
    ++row;
  }
}

void Engine::Fork(Sequence* parent) {
  Request* r = parent->request;
  r->forked = true;
  counters_.prompt_tokens += parent->num_prompt;
  counters_.cached_tokens += parent->num_cached;
  for (uint32_t i = 1; i < r->params.n; ++i) {
    auto child = std::make_unique<Sequence>();
    child->request = r;
    child->priority = parent->priority;
    child->arrival = parent->arrival;
    child->output_index = i;
    child->num_prompt = parent->num_prompt;
    child->tokens.reserve(r->max_length);
    child->tokens = parent->tokens;
    scheduler_.Fork(*parent, child.get());
    r->sequences.push_back(std::move(child));
  }
}

void Engine::Postprocess() {
  for (const Sampled& s : sampled_) {
    if (s.sequence->state == Sequence::State::kDone) continue;  // a sibling failed the request
    if (s.status.ok()) {
      AppendToken(s.sequence, s.result);
    } else {
      EndRequest(s.sequence->request, LLMC_EVENT_FAILED, LLMC_FINISH_ERROR, s.status.code);
    }
  }
}

void Engine::AppendToken(Sequence* s, const SampleResult& sample) {
  const SamplingParams& params = s->request->params;
  const bool stop = (!params.ignore_eos && Contains(model_.eos_token_ids, sample.token)) ||
                    Contains(params.stop_token_ids, sample.token);
  if (stop) return Finish(s, LLMC_FINISH_STOP, &sample);
  s->tokens.push_back(sample.token);
  ++counters_.output_tokens;
  llmc_event event = MakeEvent(*s, s->output_index, LLMC_EVENT_TOKEN);
  SetSample(sample, &event);
  new_events_.push_back(event);
  if (s->tokens.size() >= s->request->max_length) Finish(s, LLMC_FINISH_LENGTH, nullptr);
}

// ---- ends ------------------------------------------------------------------------------------------------------

void Engine::Finish(Sequence* s, uint32_t reason, const SampleResult* stop) {
  scheduler_.Remove(s);
  s->finished = true;
  llmc_event event = MakeEvent(*s, s->output_index, LLMC_EVENT_FINISHED);
  event.finish_reason = reason;
  if (stop != nullptr) SetSample(*stop, &event);
  new_events_.push_back(event);
  Request* r = s->request;
  if (--r->num_unfinished > 0) return;
  r->ended = true;
  ++counters_.num_finished;
  ended_.push_back(r);
}

// Ends every unfinished continuation, with one event each.
void Engine::EndRequest(Request* r, uint32_t kind, uint32_t reason, llmc_status code) {
  if (r->ended) return;
  for (uint32_t i = 0; i < r->params.n; ++i) {
    Sequence* s = r->sequences[i < r->sequences.size() ? i : 0].get();
    const bool exists = i < r->sequences.size();
    if (exists && s->finished) continue;
    if (exists) scheduler_.Remove(s);
    llmc_event event = MakeEvent(*s, i, kind);
    event.finish_reason = reason;
    event.error_code = code;
    new_events_.push_back(event);
  }
  r->num_unfinished = 0;
  r->ended = true;
  ++counters_.num_finished;
  ended_.push_back(r);
}

void Engine::FailAll(llmc_status code) {
  std::vector<Request*> all;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [id, request] : live_) {
      if (request->sequences[0]->state != Sequence::State::kNew) all.push_back(request.get());
    }
  }
  std::sort(all.begin(), all.end(), [](const Request* a, const Request* b) { return a->id < b->id; });
  for (Request* r : all) EndRequest(r, LLMC_EVENT_FAILED, LLMC_FINISH_ERROR, code);
}

llmc_event Engine::MakeEvent(const Sequence& s, uint32_t output_index, uint32_t kind) const {
  llmc_event event;
  std::memset(&event, 0, sizeof(event));
  event.kind = kind;
  event.request_id = s.request->id;
  event.output_index = output_index;
  event.token_id = -1;
  event.num_prompt_tokens = s.num_prompt;
  event.num_cached_tokens = s.num_cached;
  event.num_output_tokens = static_cast<uint32_t>(s.tokens.size()) - s.num_prompt;
  event.time_ns = MonotonicNs();
  return event;
}

void Engine::SetSample(const SampleResult& sample, llmc_event* event) {
  event->token_id = sample.token;
  event->logprob = sample.logprob;
  event->num_top = sample.num_top;
  std::copy_n(sample.top_token_ids, sample.num_top, event->top_token_ids);
  std::copy_n(sample.top_logprobs, sample.num_top, event->top_logprobs);
}

// Makes the step visible to other threads: events, statistics, the end of requests.
void Engine::Publish(bool stepped) {
  llmc_engine_stats& c = counters_;
  if (stepped) {
    const GraphShape& g = model_.graphs[plan_.graph];
    ++c.num_steps;
    ++(plan_.prefill ? c.num_prefill_steps : c.num_decode_steps);
    c.scheduled_tokens += plan_.num_tokens;
    c.padded_tokens += g.max_tokens - plan_.num_tokens;
  }
  c.num_running = scheduler_.num_running();
  c.num_blocks = blocks_.num_usable();
  c.num_free_blocks = blocks_.num_free();
  c.num_cached_blocks = blocks_.num_cached();
  c.num_threads = device_->num_threads();
  c.num_preemptions = scheduler_.num_preemptions();
  c.num_bucket_misses = scheduler_.num_bucket_misses();

  std::lock_guard<std::mutex> lock(mutex_);
  if (stepped) {
    ++graph_replays_[plan_.graph];
    graph_tokens_[plan_.graph] += plan_.num_tokens;
  }
  events_.insert(events_.end(), new_events_.begin(), new_events_.end());
  new_events_.clear();
  if (!ended_.empty()) {
    // A cancel may still name a request that ends now.
    cancel_inbox_.erase(std::remove_if(cancel_inbox_.begin(), cancel_inbox_.end(), [](Request* r) { return r->ended; }),
                        cancel_inbox_.end());
    for (Request* r : ended_) live_.erase(r->id);
    ended_.clear();
  }
  num_queued_ = static_cast<uint32_t>(inbox_.size()) + scheduler_.num_unstarted();
  c.num_waiting = static_cast<uint32_t>(inbox_.size()) + scheduler_.num_waiting();
  stats_ = c;
}

}  // namespace llmc
