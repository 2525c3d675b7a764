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
  if (model.takes_states) {
    return Status::Invalid(
        "The artifact is a head that guesses for another model; run that one, with this as its draft.");
  }
  if (device->num_blocks() < 2 || static_cast<uint64_t>(device->num_blocks() - 1) * model.block_size < 2) {
    return Status::Invalid("The KV pool has no block besides the dummy block; raise kv_bytes or num_blocks.");
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
    return Status::Invalid("swap_bytes is " + std::to_string(options_.swap_bytes) + " but a KV block has " +
                           std::to_string(bytes) + " bytes; raise it, or leave it out.");
  }
  LLMC_RETURN_IF_ERROR(device_->OpenSwapSpace(static_cast<uint32_t>(places), &swap_block_ns_));
  scheduler_.swap()->Open(static_cast<uint32_t>(places), options_.swap_always);
  return Status::Ok();
}

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
        speculator_.KeepStates(plan_, device_->states());
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

// What computing a token again costs: a running mean of prefill steps.
void Engine::CountPrefill() {
  if (!plan_.prefill || !scheduler_.swap()->open()) return;
  const uint64_t ns = replay_ns_ / std::max(plan_.load.tokens, 1u);
  token_ns_ = token_ns_ == 0 ? ns : (7 * token_ns_ + ns) / 8;
  scheduler_.swap()->SetCosts(swap_block_ns_, token_ns_);
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

}  // namespace llmc
