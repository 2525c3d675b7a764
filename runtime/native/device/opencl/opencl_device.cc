#include "device/opencl/opencl_device.h"

#include <algorithm>
#include <utility>

#include "device/gpu/joining_graphs.h"
#include "device/gpu/swap_time.h"
#include "device/rank_count.h"

namespace llmc {
namespace {

constexpr uint64_t kWordBytes = sizeof(int32_t);  // bytes of a word of inputs

}  // namespace

ClQueue::~ClQueue() {
  if (queue_ == nullptr) return;
  (*machine_)->Finish(queue_);
  (*machine_)->ReleaseCommandQueue(queue_);
}

Status ClQueue::Open() {
  cl_int code = kClSuccess;
  queue_ = (*machine_)->CreateCommandQueue(machine_->context(), machine_->device(), 0, &code);
  LLMC_RETURN_IF_CL_ERROR("Opening a queue of '" + machine_->name() + "'", code);
  return Status::Ok();
}

OpenClDevice::~OpenClDevice() {
  if (queue_.get() != nullptr) (*machine_)->Finish(queue_.get());
}

Status OpenClDevice::Create(std::shared_ptr<const ClMachine> machine, std::shared_ptr<const Artifact> artifact,
                            const LoadOptions& load, const OpenClDeviceOptions& options,
                            std::unique_ptr<OpenClDevice>* out) {
  LLMC_RETURN_IF_ERROR(CheckNumBlocks(*artifact, load.num_blocks));
  LLMC_RETURN_IF_ERROR(CheckRankCount(*artifact, load.collective.get()));
  std::unique_ptr<OpenClDevice> device(new OpenClDevice(std::move(machine), std::move(artifact), load.collective));
  LLMC_RETURN_IF_ERROR(device->Load(load.num_blocks, options));
  *out = std::move(device);
  return Status::Ok();
}

Status OpenClDevice::Load(uint32_t num_blocks, const OpenClDeviceOptions& options) {
  options_ = options;
  // Programs first: code that this device cannot run is refused before anything large is allocated.
  LLMC_RETURN_IF_ERROR(ClPrograms::Build(machine_, *artifact_, options.cache_folder, nullptr, &run_.programs));
  LLMC_RETURN_IF_ERROR(queue_.Open());
  const uint32_t rank = ranks_ == nullptr ? 0 : ranks_->rank();
  LLMC_RETURN_IF_ERROR(
      ClMemory::Make(machine_, *artifact_, num_blocks, rank, options.offload_bytes, queue_.get(), &memory_));
  if (options.sample && ranks_ == nullptr) {  // of several ranks, the host of rank 0 draws
    LLMC_RETURN_IF_ERROR(ClSampling::Make(machine_, *artifact_, *run_.programs, *memory_, queue_.get(), &sampling_));
  }
  return MakeRunner(*artifact_, 0, &run_);
}

Status OpenClDevice::MakeRunner(const Artifact& artifact, size_t first_new, Runner* out) {
  LLMC_RETURN_IF_ERROR(memory_->MakeWork(artifact, queue_.get(), &out->work));
  const uint32_t in_flight = overlap() == Overlap::kChained ? 2 : 1;
  LLMC_RETURN_IF_ERROR(ClGraphs::Make(machine_, artifact, *out->programs, *memory_, out->work, queue_.get(), in_flight,
                                      options_.graphs, ranks_, &out->graphs));
  for (auto& inputs : out->inputs) inputs.resize(out->work.step_bytes / kWordBytes);
  out->logits.resize(out->work.logit_bytes / sizeof(float));
  // A driver may finish code at its first use: after this, nothing is compiled any more.
  for (size_t g = first_new; g < artifact.graphs().size(); ++g) {
    const auto graph = static_cast<uint32_t>(g);
    for (size_t i = 0; i < out->graphs->num_forms(graph); ++i) LLMC_RETURN_IF_ERROR(RunEmpty(out, graph));
  }
  // Only with the first graphs: sampling kernels serve all graphs, and may be running when more are added.
  if (sampling_ != nullptr && first_new == 0) {
    sampling_->set_logits(out->work.logits);
    sampling_->set_inputs(out->work.step, out->graphs->inputs(0));
    LLMC_RETURN_IF_ERROR(sampling_->RunEmpty());
  }
  out->programs->Store();
  return Status::Ok();
}

// Kernels of new graphs have objects of their own, so that they may be built and run beside steps.
Status OpenClDevice::NewGraphsOf(const std::shared_ptr<const Artifact>& artifact, std::unique_ptr<NewGraphs>* out) {
  const auto make = [this](const Artifact& extended, Runner* runner) {
    LLMC_RETURN_IF_ERROR(
        ClPrograms::Build(machine_, extended, options_.cache_folder, run_.programs.get(), &runner->programs));
    return MakeRunner(extended, artifact_->graphs().size(), runner);
  };
  return JoiningGraphs<Runner>::Of({&artifact_, &shape_, &run_}, artifact, make, out);
}

void OpenClDevice::Adopt(NewGraphs* graphs) { static_cast<JoiningGraphs<Runner>*>(graphs)->Adopt(); }

Status OpenClDevice::WriteInputs(const Runner& runner, uint64_t bytes) {
  LLMC_RETURN_IF_CL_ERROR("Copying a step's inputs to '" + machine_->name() + "'",
                          (*machine_)->EnqueueWriteBuffer(queue_.get(), runner.work.step.get(), kClFalse, 0, bytes,
                                                          runner.inputs[runner.filled].data(), 0, nullptr, nullptr));
  return Status::Ok();
}

// Replays a graph without rows. The arena is cleared because kernels may read row counts from it, too, which an earlier
// step has written.
Status OpenClDevice::RunEmpty(Runner* runner, uint32_t graph) {
  auto& inputs = runner->inputs[runner->filled];
  std::fill(inputs.begin(), inputs.end(), 0);
  LLMC_RETURN_IF_ERROR(memory_->ClearArena(queue_.get(), runner->work));
  LLMC_RETURN_IF_ERROR(WriteInputs(*runner, runner->graphs->inputs(graph).bytes));
  const Status enqueued = runner->graphs->Enqueue(graph, {});
  const Status waited = machine_->AwaitQueued(queue_.get(), "Replaying a graph");
  return enqueued.ok() ? waited : enqueued;
}

// The other copy of inputs may be on its way yet. *bytes: what the device needs of this one.
Status OpenClDevice::FillInputs(const StepBatch& batch, uint64_t* bytes) {
  LLMC_RETURN_IF_ERROR(CheckSizes(batch));
  LLMC_RETURN_IF_ERROR(CheckBatch(model(), num_blocks(), ViewOf(batch)));
  run_.filled = 1 - run_.filled;
  *bytes = FillStep(model(), num_blocks(), batch, run_.graphs->inputs(batch.graph), &tiler_, run_.words());
  return Status::Ok();
}

Status OpenClDevice::TakeInputs(const StepBatch& batch) {
  uint64_t bytes = 0;
  LLMC_RETURN_IF_ERROR(FillInputs(batch, &bytes));
  return WriteInputs(run_, bytes);
}

Status OpenClDevice::Enqueue(const StepBatch& batch, Fence* fence) {
  *fence = ++last_fence_;
  const Status status = Submit(batch);
  // Work enqueued before the error may still read the inputs.
  if (!status.ok()) (*machine_)->Finish(queue_.get());
  return status;
}

Status OpenClDevice::Begin(const StepBatch& batch) {
  LLMC_RETURN_IF_ERROR(TakeInputs(batch));
  begun_ = batch.graph;
  return Status::Ok();
}

Status OpenClDevice::RunCommand(uint32_t command) {
  LLMC_RETURN_IF_ERROR(CheckCommand(*artifact_, begun_, command));
  LLMC_RETURN_IF_ERROR(run_.graphs->EnqueueCommand(begun_, command));
  LLMC_RETURN_IF_CL_ERROR("A kernel on '" + machine_->name() + "'", (*machine_)->Finish(queue_.get()));
  return Status::Ok();
}

Status OpenClDevice::ReadOperand(uint32_t command, uint32_t operand, uint64_t bytes, void* out) {
  LLMC_RETURN_IF_ERROR(CheckOperand(*artifact_, begun_, command, operand, bytes));
  if (bytes == 0) return Status::Ok();
  const ClPlace& place = run_.graphs->place(begun_, command, operand);
  LLMC_RETURN_IF_CL_ERROR(
      "Reading memory of '" + machine_->name() + "'",
      (*machine_)->EnqueueReadBuffer(queue_.get(), place.memory, kClTrue, static_cast<uint64_t>(place.at) * kAlignment,
                                     bytes, out, 0, nullptr, nullptr));
  return Status::Ok();
}

Status OpenClDevice::Submit(const StepBatch& b) {
  LLMC_RETURN_IF_ERROR(TakeInputs(b));
  return Replay(b);
}

Status OpenClDevice::Replay(const StepBatch& b) {
  LLMC_RETURN_IF_ERROR(run_.graphs->Enqueue(b.graph, {b.num_tokens, b.num_samples}));
  num_samples_ = b.num_samples;
  LLMC_RETURN_IF_CL_ERROR("Starting a step on '" + machine_->name() + "'", (*machine_)->Flush(queue_.get()));
  ++(launches(b.graph) ? num_launched_ : num_replayed_);
  return Status::Ok();
}

Status OpenClDevice::Wait(Fence, const float** logits) {
  const ClMachine& cl = *machine_;
  const uint64_t bytes = uint64_t{num_samples_} * model().output_width() * sizeof(float);
  const cl_int code = bytes == 0 ? cl->Finish(queue_.get())
                                 : cl->EnqueueReadBuffer(queue_.get(), run_.work.logits.get(), kClTrue, 0, bytes,
                                                         run_.logits.data(), 0, nullptr, nullptr);
  LLMC_RETURN_IF_CL_ERROR("A step on '" + cl.name() + "'", code);
  *logits = run_.logits.data();
  return Status::Ok();
}

Status OpenClDevice::Sample(Fence, const std::vector<SampleTask>& tasks, std::vector<SampleOutcome>* outcomes) {
  if (!tasks.empty()) {
    sampling_->set_logits(run_.work.logits);
    return sampling_->Draw(tasks, outcomes);
  }
  LLMC_RETURN_IF_CL_ERROR("A step on '" + machine_->name() + "'", (*machine_)->Finish(queue_.get()));
  return Status::Ok();
}

Status OpenClDevice::Chain(const std::vector<SampleTask>& tasks, const StepBatch& next,
                           const std::vector<DrawnRow>& drawn, Fence* fence, bool* chained) {
  *chained = false;
  const Status status = SubmitChain(tasks, next, drawn, chained);
  if (!status.ok()) (*machine_)->Finish(queue_.get());
  if (*chained) *fence = ++last_fence_;
  return status;
}

Status OpenClDevice::SubmitChain(const std::vector<SampleTask>& tasks, const StepBatch& next,
                                 const std::vector<DrawnRow>& drawn, bool* chained) {
  sampling_->set_logits(run_.work.logits);
  bool begun = false;
  LLMC_RETURN_IF_ERROR(sampling_->Begin(tasks, &begun));
  if (!begun) return Status::Ok();
  uint64_t bytes = 0;
  LLMC_RETURN_IF_ERROR(FillInputs(next, &bytes));
  const StepLayout& layout = run_.graphs->inputs(next.graph);
  sampling_->Mark(drawn, run_.words() + layout.offsets[kInputIds] / kWordBytes);
  LLMC_RETURN_IF_ERROR(WriteInputs(run_, bytes));
  sampling_->set_inputs(run_.work.step, layout);
  LLMC_RETURN_IF_ERROR(sampling_->Feed(next.num_tokens));
  LLMC_RETURN_IF_ERROR(Replay(next));
  *chained = true;
  return Status::Ok();
}

// Block 0 belongs to no sequence, so it is used for timing copies.
Status OpenClDevice::OpenSwapSpace(uint32_t num_places, uint64_t* ns) {
  LLMC_RETURN_IF_ERROR(memory_->OpenSwapSpace(num_places));
  const auto copy = [this] {
    LLMC_RETURN_IF_ERROR(memory_->SaveBlock(queue_.get(), 0, 0));
    return memory_->LoadBlock(queue_.get(), 0, 0);
  };
  const auto finish = [this] {
    LLMC_RETURN_IF_CL_ERROR("Copying KV blocks on '" + machine_->name() + "'", (*machine_)->Finish(queue_.get()));
    return Status::Ok();
  };
  return TimeSwap(copy, finish, ns);
}

Status OpenClDevice::SaveBlock(uint32_t block, uint32_t place) {
  ++num_saved_;
  return memory_->SaveBlock(queue_.get(), block, place);
}

Status OpenClDevice::LoadBlock(uint32_t place, uint32_t block) {
  ++num_loaded_;
  return memory_->LoadBlock(queue_.get(), place, block);
}

void OpenClDevice::GetStats(std::vector<DeviceStat>* out) const {
  *out = {{"weight_bytes", memory_->weight_bytes()},
          {"offloaded_weight_bytes", memory_->offloaded_bytes()},
          {"kv_pool_bytes", memory_->pool_bytes()},
          {"graph_bytes", run_.graphs->recorded_bytes()},
          {"recorded_graphs", run_.graphs->num_recorded()},
          {"launched_graphs", artifact_->graphs().size() - run_.graphs->num_recorded()},
          {"replayed_steps", num_replayed_},
          {"launched_steps", num_launched_},
          {"records_graphs", !options_.graphs.eager && machine_->command_buffers() != nullptr},
          {"programs", run_.programs->num_programs()},
          {"cached_programs", run_.programs->num_cached()},
          {"saved_blocks", num_saved_},
          {"loaded_blocks", num_loaded_}};
  GpuSampling::AddStats(sampling_.get(), out);
}

}  // namespace llmc
