#include "engine/engine.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>

#include "core/clock.h"

namespace llmc {

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
    return Status::Invalid("max_num_seqs is " + std::to_string(options.max_num_seqs) +
                           " but the artifact was built for " + std::to_string(model.max_num_seqs) +
                           "; lower it or build the artifact with a larger one.");
  }
  if (model.takes_states && !model.places_rows) {
    return Status::Invalid(
        model.vector_width > 0
            ? "The artifact encodes images for another model; run that one, with this for its images."
            : "The artifact is a head that guesses for another model; run that one, with this as its draft.");
  }
  if (model.places_rows && device->TakenStates() == nullptr) {
    return Status::Invalid("The artifact takes rows of images, which a device of several ranks cannot; run it on one.");
  }
  if (device->num_blocks() < 2 || static_cast<uint64_t>(device->num_blocks() - 1) * model.block_size < 2) {
    return Status::Invalid("The KV pool has no block besides the dummy block; raise kv_bytes or num_blocks.");
  }
  if (model.recurrent() && device->num_states() < 2) {
    return Status::Invalid("The pool of states has no slot besides the dummy slot; raise kv_bytes or num_states.");
  }
  std::unique_ptr<DraftModel> drafts;
  if (draft != nullptr) LLMC_RETURN_IF_ERROR(DraftModel::Create(std::move(draft), model, &drafts));
  std::unique_ptr<Engine> made(new Engine(std::move(device), options, std::move(drafts)));
  if (options.swap_bytes > 0) LLMC_RETURN_IF_ERROR(made->OpenSwapSpace());
  *out = std::move(made);
  return Status::Ok();
}

namespace {

// Guesses go behind known tokens and are part of a sequence while its step is in flight: one step at a time.
uint32_t StepsInFlight(const Device& device, const EngineOptions& options) {
  return options.speculate_tokens == 0 && device.overlap() == Overlap::kDisjoint ? device.steps_in_flight() : 1;
}

}  // namespace

Engine::Engine(std::unique_ptr<Device> device, const EngineOptions& options, std::unique_ptr<DraftModel> draft)
    : device_(std::move(device)),
      model_(device_->model()),
      options_(options),
      max_length_(static_cast<uint32_t>(std::min<uint64_t>(
          model_.max_model_len, static_cast<uint64_t>(device_->num_blocks() - 1) * model_.block_size))),
      blocks_(device_->num_blocks(), static_cast<uint32_t>(model_.block_size),
              options.prefix_cache && !model_.whole_prompts, device_->num_states()),
      scheduler_(model_,
                 {options.max_num_seqs ? options.max_num_seqs : static_cast<uint32_t>(model_.max_num_seqs),
                  options.max_tokens_per_step, options.miss_policy, StepsInFlight(*device_, options),
                  options.priority_patience ? options.priority_patience : SchedulerOptions::kDefaultPatience,
                  options.keep_states_every},
                 &blocks_),
      host_sampler_(*device_),
      speculator_(options.speculate_tokens, options.speculate_always, std::move(draft), device_->made_up_guess()),
      more_(StepsInFlight(*device_, options) - 1) {
  ListGraphs();
  if (options_.max_waiting == 0) options_.max_waiting = 65536;
  std::memset(&counters_, 0, sizeof(counters_));
  counters_.max_request_tokens = max_length_;
  Publish(false, false);
}

Status Engine::OpenSwapSpace() {
  const uint64_t bytes = std::max<uint64_t>(model_.kv_block_bytes, 1), least = bytes + model_.state_bytes;
  if (options_.swap_bytes < least) {
    return Status::Invalid("swap_bytes is " + std::to_string(options_.swap_bytes) + " but a KV block" +
                           (model_.recurrent() ? " and a sequence's states have " : " has ") + std::to_string(least) +
                           " bytes; raise it, or leave it out.");
  }
  // Up to half of it is for states, as many as sequences may wait with, and at least a block has room beside them.
  uint64_t states = 0;
  if (model_.recurrent()) {
    const uint64_t most = 4 * uint64_t{options_.max_num_seqs ? options_.max_num_seqs : model_.max_num_seqs};
    const uint64_t room = std::min(options_.swap_bytes / 2, options_.swap_bytes - bytes);
    states = std::clamp<uint64_t>(room / model_.state_bytes, 1, most);
  }
  const auto places = static_cast<uint32_t>(
      std::min<uint64_t>((options_.swap_bytes - states * model_.state_bytes) / bytes, UINT32_MAX));
  LLMC_RETURN_IF_ERROR(
      device_->OpenSwapSpace(places, static_cast<uint32_t>(states), &swap_costs_.block, &swap_costs_.state));
  scheduler_.swap()->Open(places, static_cast<uint32_t>(states), options_.swap_always);
  return Status::Ok();
}

Engine::~Engine() { Drain(); }

// Calls call(). If memory runs out, everything begun is given up.
template <class Call>
Status Engine::OrForget(const Call& call) {
  try {
    if (out_of_memory_) FailAfterOutOfMemory();
    return call();
  } catch (const std::bad_alloc&) {
    Drain();
    Scheduler::DropGuesses(&step_.plan);
    Forget();
    FailAfterOutOfMemory();
    throw;
  }
}

Status Engine::Step(bool* progressed) {
  std::lock_guard<std::mutex> step_lock(step_mutex_);
  return OrForget([&] { return StepOnce(progressed); });
}

// Ends steps in flight and starts none: for calls that need an idle device. If one fails, the next Step returns the error;
// the caller goes on if the device does.
Status Engine::Land() {
  return OrForget([this] {
    Status status;
    while (step_.on_its_way && status.ok()) {
      const uint64_t begin = MonotonicNs();
      bool stepped = false;
      status = EndStep(false, begin, &stepped);
      CountTime(stepped, MonotonicNs() - begin);
      if (!status.ok()) landed_ = status;
      Publish(stepped, true);
      GoOn();
    }
    return DeviceGoesOn(status) ? Status::Ok() : status;
  });
}

// The next step in flight, if any, is now the one to end.
void Engine::GoOn() {
  if (ahead_.on_its_way) std::swap(step_, ahead_);
  if (num_more_ == 0) return;
  std::swap(step_, more_.front());
  std::rotate(more_.begin(), more_.begin() + 1, more_.end());
  --num_more_;
}

// If a step was enqueued behind the one before, it only has to end.
Status Engine::StepOnce(bool* progressed) {
  if (!landed_.ok()) return std::exchange(landed_, Status::Ok());
  if (!step_.on_its_way) AwaitMasks();
  const uint64_t begin = MonotonicNs(), clock = device_->ClockNs();
  TakeInbox(begin);
  const uint64_t preemptions = scheduler_.num_preemptions();
  const bool ahead = step_.on_its_way;
  bool run = ahead, stepped = false;
  Status status;
  if (!ahead) status = BeginStep(&step_, &run);
  if (run && status.ok()) status = BeginMore();
  const uint64_t since = !more_.empty() ? MonotonicNs() : ahead ? begin : step_.enqueued_ns;
  *progressed = run || !new_events_.empty() || scheduler_.num_preemptions() != preemptions;
  const uint64_t output_tokens = counters_.output_tokens;
  if (run && status.ok()) status = EndStep(true, since, &stepped);
  const uint64_t took = MonotonicNs() - begin;
  if (stepped) speculator_.Learn(counters_.output_tokens - output_tokens, device_->ClockNs() - clock);
  CountTime(stepped, took);
  Publish(stepped, *progressed);
  GoOn();
  return status;
}

// Begins steps of sequences that are in no step, as many as the device takes.
Status Engine::BeginMore() {
  for (bool run = true; run && num_more_ < more_.size() && scheduler_.HasMore();) {
    LLMC_RETURN_IF_ERROR(BeginStep(&more_[num_more_], &run));
    num_more_ += run;
    counters_.num_ahead_steps += run;
  }
  return Status::Ok();
}

// Plans a step and enqueues it. *run: it has something to compute.
Status Engine::BeginStep(EngineStep* step, bool* run) {
  const uint64_t begin = MonotonicNs();
  scheduler_.Schedule(&step->plan);
  const uint64_t scheduled = MonotonicNs();
  counters_.schedule_ns += scheduled - begin;
  step->scheduled_ns = scheduled;
  if (marks_.on()) MarkPreempted(*step);
  for (Sequence* s : step->plan.misses) FailRequest(s->request, MissOf(*s, step->plan.miss));
  // A missed request may have other sequences in the plan: then the plan is void and the next step plans anew.
  *run = !step->plan.items.empty() && step->plan.misses.empty();
  Status status;
  if (*run) {
    TakeMasks(step->plan);
    status = speculator_.Plan(&scheduler_, &step->plan);
  }
  const StepPlan& plan = step->plan;
  if (!*run && plan.copies_nothing()) return status;
  Prepare(step);
  if (*run && status.ok()) status = device_->BeforeStep();
  const uint64_t replay = MonotonicNs();
  counters_.prepare_ns += replay - scheduled;
  step->enqueued_ns = replay;
  if (status.ok()) status = CopyBlocks(plan);
  if (status.ok()) status = *run ? Enqueue(step) : device_->AwaitCopies();
  // Else it is counted until the step has ended.
  if (!*run || !status.ok() || !more_.empty()) counters_.replay_ns += MonotonicNs() - replay;
  if (!status.ok()) FailSteps(status, step);
  return status;
}

Status Engine::CopyBlocks(const StepPlan& plan) {
  using Copies = std::vector<StepPlan::Copy>;
  const auto all = [this](const Copies& copies, Status (Device::*copy)(uint32_t, uint32_t)) {
    for (const StepPlan::Copy& one : copies) LLMC_RETURN_IF_ERROR(((*device_).*copy)(one.from, one.to));
    return Status::Ok();
  };
  LLMC_RETURN_IF_ERROR(all(plan.saves, &Device::SaveBlock));
  LLMC_RETURN_IF_ERROR(all(plan.state_saves, &Device::SaveState));
  LLMC_RETURN_IF_ERROR(all(plan.copies, &Device::CopyBlock));
  LLMC_RETURN_IF_ERROR(all(plan.state_copies, &Device::CopyState));
  LLMC_RETURN_IF_ERROR(all(plan.loads, &Device::LoadBlock));
  return all(plan.state_loads, &Device::LoadState);
}

Status Engine::Enqueue(EngineStep* step) {
  LLMC_RETURN_IF_ERROR(EnqueueRows(*step, &step->fence));
  step->on_its_way = step->launched = true;
  scheduler_.Launch(step->plan);
  return Status::Ok();
}

// Waits for the step in flight and processes its results. Meanwhile requests are taken in and the next step is planned,
// which changes nothing that the device uses. If goes_on, that step is enqueued before these results are processed, or
// even before they are known.
// since_ns: start of the host's share of the replay: the enqueueing, or this call if the step was ahead.
// *stepped: this step ended well, whatever became of the next one.
Status Engine::EndStep(bool goes_on, uint64_t since_ns, bool* stepped) {
  const bool writes = model_.vector_width == 0;
  if (writes) ListTasks(&step_);
  outcomes_.resize(step_.tasks.size());
  const bool overlaps = device_->overlap() == Overlap::kPrepared || device_->overlap() == Overlap::kChained;
  if (overlaps) TakeArrivals();
  const bool prepared = overlaps && goes_on && PrepareAhead();

  const float* logits = nullptr;
  bool chained = false;
  Status status = prepared ? ChainAhead(&chained) : Status::Ok();
  if (status.ok()) {
    status = chained                        ? SampleChained(&chained)
             : writes && device_->samples() ? device_->Sample(step_.fence, step_.tasks, &outcomes_)
                                            : device_->Wait(step_.fence, &logits);
  }
  step_.on_its_way = false;
  const uint64_t done = MonotonicNs();
  replay_ns_ = done - std::max(step_.enqueued_ns, landed_ns_);
  landed_ns_ = done;
  counters_.replay_ns += done - since_ns;
  const float* hidden = nullptr;
  if (status.ok() && speculator_.keeps_states()) status = device_->ReadStates(step_.batch.num_tokens, &hidden);
  if (!status.ok()) {
    FailSteps(status, &step_);
    return status;
  }
  replay_time_ = device_->last_replay();
  if (writes && !device_->samples()) host_sampler_.Draw(device_.get(), logits, step_.tasks, &outcomes_);
  if (chained) {
    FillDrawn(&ahead_);  // for the case that it must run again
    ahead_.enqueued_ns = done;
    ++counters_.num_ahead_steps;
  } else if (prepared && StillWanted()) {
    status = EnqueueAhead();
  }
  step_.launched = false;
  counters_.num_thrown_rows += scheduler_.Commit(step_.plan);
  CountPrefill();
  if (marks_.on()) MarkChunks(done);
  if (writes) {
    Scheduler::DropGuesses(&step_.plan);
    if (hidden != nullptr) speculator_.KeepStates(step_.plan, hidden);
    Postprocess();
  } else {
    GiveVectors(logits);
  }
  counters_.sample_ns += MonotonicNs() - done;
  *stepped = true;
  if (!status.ok()) FailSteps(status, &ahead_);
  return status;
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
    // Cancels are read before arrivals: every cancelled request has then arrived.
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

// Running mean of the time per token of prefill steps: the cost of recomputing a token.
void Engine::CountPrefill() {
  if (!step_.plan.prefill || !scheduler_.swap()->open()) return;
  const uint64_t ns = replay_ns_ / std::max(step_.plan.load.tokens, 1u);
  swap_costs_.token = swap_costs_.token == 0 ? ns : (7 * swap_costs_.token + ns) / 8;
  scheduler_.swap()->SetCosts(swap_costs_);
}

void Engine::MarkPreempted(const EngineStep& step) {
  for (const Sequence* s : step.plan.preempted) {
    marks_.Add(
        {0, LLMC_MARK_PREEMPTED, s->request->id, s->output_index, 0, 0, 0, step.scheduled_ns, step.scheduled_ns});
  }
}

// Call before results are processed: tokens that they append would make the last row of a prompt look like a decode.
void Engine::MarkChunks(uint64_t done_ns) {
  for (const StepItem& item : step_.plan.items) {
    const Sequence& s = *item.sequence;
    if (item.start >= s.num_prompt && item.decodes()) continue;
    marks_.Add({0, LLMC_MARK_PREFILL, s.request->id, s.output_index, step_.plan.graph, item.start, item.count,
                step_.scheduled_ns, done_ns});
  }
}

void Engine::CountTime(bool stepped, uint64_t step_ns) {
  llmc_engine_stats& c = counters_;
  c.step_ns += step_ns;
  if (!stepped) return;
  c.kernel_ns += replay_time_.kernel_ns;
  c.barrier_ns += replay_time_.barrier_ns;
  if (step_.plan.prefill) return;
  c.decode_step_ns += step_ns;
  c.decode_kernel_ns += replay_time_.kernel_ns;
  c.decode_barrier_ns += replay_time_.barrier_ns;
}

}  // namespace llmc
