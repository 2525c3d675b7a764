#include "device/cuda/cuda_device.h"

#include <cstring>
#include <string>
#include <utility>

#include "device/gpu/joining_graphs.h"
#include "device/gpu/swap_time.h"
#include "device/rank_count.h"

namespace llmc {
namespace {

constexpr uint64_t kInputWordBytes = sizeof(int32_t);

}  // namespace

Status CudaDevice::Create(const CuMachinePtr& machine, std::shared_ptr<const Artifact> artifact,
                          const LoadOptions& load, const CudaDeviceOptions& options, std::unique_ptr<CudaDevice>* out) {
  LLMC_RETURN_IF_ERROR(CheckNumBlocks(*artifact, load.num_blocks));
  LLMC_RETURN_IF_ERROR(CheckRankCount(*artifact, load.collective.get()));
  const CuScope scope(*machine);
  LLMC_RETURN_IF_ERROR(scope.status());
  std::unique_ptr<CudaDevice> device(new CudaDevice(machine, std::move(artifact), load.collective));
  LLMC_RETURN_IF_ERROR(device->Load(load.num_blocks, options));
  *out = std::move(device);
  return Status::Ok();
}

// Programs first: code that this device cannot run is refused before anything large is allocated.
Status CudaDevice::Load(uint32_t num_blocks, const CudaDeviceOptions& options) {
  options_ = options;
  LLMC_RETURN_IF_ERROR(CuPrograms::Load(machine_, *artifact_, nullptr, &run_.programs));
  LLMC_RETURN_IF_ERROR(MakeStream(machine_, &stream_));
  LLMC_RETURN_IF_ERROR(MakeEvent(machine_, &done_));
  const uint32_t rank = ranks_ == nullptr ? 0 : ranks_->rank();
  LLMC_RETURN_IF_ERROR(
      CuMemory::Make(machine_, *artifact_, num_blocks, rank, options.offload_bytes, stream_.get(), &memory_));
  LLMC_RETURN_IF_ERROR(MakeRunner(*artifact_, 0, &run_));
  // Of several ranks, the host of rank 0 draws.
  if (!options.sample || ranks_ != nullptr) return Status::Ok();
  LLMC_RETURN_IF_ERROR(CuSampling::Make(machine_, *artifact_, run_.programs, stream_.get(), &sampling_));
  if (sampling_ == nullptr) return Status::Ok();
  sampling_->set_logits(run_.work.logits.get());
  sampling_->set_inputs(run_.work.step.get(), run_.graphs->inputs(0));
  return sampling_->RunEmpty();
}

Status CudaDevice::MakeRunner(const Artifact& artifact, size_t first_new, Runner* out) {
  LLMC_RETURN_IF_ERROR(memory_->MakeWork(artifact, stream_.get(), &out->work));
  for (CuPinned& inputs : out->inputs) {
    LLMC_RETURN_IF_ERROR(TakePinned(machine_, "inputs", out->work.step_bytes, &inputs));
  }
  LLMC_RETURN_IF_ERROR(TakePinned(machine_, "logits", out->work.logit_bytes, &out->logits));
  LLMC_RETURN_IF_ERROR(CuGraphs::Make(machine_, artifact, *out->programs, *memory_, out->work, stream_.get(),
                                      options_.graphs, ranks_, &out->graphs));
  // A driver may load code at its first use: after this, nothing is loaded or allocated any more.
  for (size_t g = first_new; g < artifact.graphs().size(); ++g) {
    LLMC_RETURN_IF_ERROR(RunEmpty(*out, static_cast<uint32_t>(g)));
  }
  return Status::Ok();
}

// Makes new memory, graphs and modules.
Status CudaDevice::NewGraphsOf(const std::shared_ptr<const Artifact>& artifact, std::unique_ptr<NewGraphs>* out) {
  const auto make = [this](const Artifact& extended, Runner* runner) {
    LLMC_RETURN_IF_ERROR(machine_->CheckAlive());
    const CuScope scope(*machine_);
    LLMC_RETURN_IF_ERROR(scope.status());
    LLMC_RETURN_IF_ERROR(CuPrograms::Load(machine_, extended, run_.programs.get(), &runner->programs));
    return MakeRunner(extended, artifact_->graphs().size(), runner);
  };
  return JoiningGraphs<Runner>::Of({&artifact_, &shape_, &run_}, artifact, make, out);
}

void CudaDevice::Adopt(NewGraphs* graphs) { static_cast<JoiningGraphs<Runner>*>(graphs)->Adopt(); }

Status CudaDevice::Finish(const char* doing) const {
  return machine_->Check(doing, (*machine_)->StreamSynchronize(stream_.get()));
}

Status CudaDevice::WriteInputs(const Runner& runner, uint64_t bytes) {
  return machine_->Check(
      "Copying a step's inputs to the GPU",
      (*machine_)->MemcpyToDevice(runner.work.step.get(), runner.inputs[runner.filled].get(), bytes, stream_.get()));
}

// Replays a graph without rows. The arena is cleared because kernels may read row counts from it, too, which an earlier
// step has written.
Status CudaDevice::RunEmpty(const Runner& runner, uint32_t graph) {
  const CuDrain drain(*machine_, stream_.get());
  const uint64_t bytes = runner.graphs->inputs(graph).bytes;
  std::memset(runner.inputs[runner.filled].get(), 0, bytes);
  LLMC_RETURN_IF_ERROR(memory_->ClearArena(stream_.get(), runner.work));
  LLMC_RETURN_IF_ERROR(WriteInputs(runner, bytes));
  LLMC_RETURN_IF_ERROR(runner.graphs->Enqueue(graph, {}));
  return Finish("Replaying a graph");
}

void CudaDevice::Visit(uint32_t graph) {
  const CuScope scope(*machine_);
  if (machine_->CheckAlive().ok() && scope.status().ok()) static_cast<void>(RunEmpty(run_, graph).ok());
}

// The other copy of inputs may be on its way yet. *bytes: what the device needs of this one.
Status CudaDevice::FillInputs(const StepBatch& batch, uint64_t* bytes) {
  LLMC_RETURN_IF_ERROR(CheckSizes(batch));
  LLMC_RETURN_IF_ERROR(CheckBatch(model(), num_blocks(), ViewOf(batch)));
  run_.filled = 1 - run_.filled;
  *bytes = FillStep(model(), num_blocks(), batch, run_.graphs->inputs(batch.graph), &tiler_, run_.words());
  return Status::Ok();
}

Status CudaDevice::TakeInputs(const StepBatch& batch) {
  uint64_t bytes = 0;
  LLMC_RETURN_IF_ERROR(FillInputs(batch, &bytes));
  return WriteInputs(run_, bytes);
}

Status CudaDevice::Enqueue(const StepBatch& batch, Fence* fence) {
  *fence = ++last_fence_;
  LLMC_RETURN_IF_ERROR(machine_->CheckAlive());
  const CuScope scope(*machine_);
  LLMC_RETURN_IF_ERROR(scope.status());
  const Status status = Submit(batch);
  // Work enqueued before the error may still read the inputs.
  if (!status.ok()) static_cast<void>(Finish("A step").ok());
  return status;
}

Status CudaDevice::Submit(const StepBatch& batch) {
  LLMC_RETURN_IF_ERROR(TakeInputs(batch));
  return Replay(batch);
}

Status CudaDevice::Replay(const StepBatch& batch) {
  const CuMachine& cuda = *machine_;
  LLMC_RETURN_IF_ERROR(run_.graphs->Enqueue(batch.graph, {batch.num_tokens, batch.num_samples}));
  num_samples_ = batch.num_samples;
  if (batch.num_samples != 0 && !samples()) {
    const uint64_t bytes = uint64_t{batch.num_samples} * model().output_width() * sizeof(float);
    LLMC_RETURN_IF_ERROR(
        cuda.Check("Reading logits from the GPU",
                   cuda->MemcpyToHost(run_.logits.get(), run_.work.logits.get(), bytes, stream_.get())));
  }
  LLMC_RETURN_IF_ERROR(cuda.Check("Starting a step", cuda->EventRecord(done_.get(), stream_.get())));
  ++(launches(batch.graph) ? num_launched_ : num_replayed_);
  return Status::Ok();
}

Status CudaDevice::Wait(Fence, const float** logits) {
  const CuScope scope(*machine_);
  LLMC_RETURN_IF_ERROR(scope.status());
  if (samples() && num_samples_ != 0) {
    const uint64_t bytes = uint64_t{num_samples_} * model().output_width() * sizeof(float);
    LLMC_RETURN_IF_ERROR(
        machine_->Check("Reading logits from the GPU",
                        (*machine_)->MemcpyToHost(run_.logits.get(), run_.work.logits.get(), bytes, stream_.get())));
    LLMC_RETURN_IF_ERROR(Finish("A step on the GPU"));
  }
  LLMC_RETURN_IF_ERROR(machine_->Check("A step on the GPU", (*machine_)->EventSynchronize(done_.get())));
  *logits = static_cast<const float*>(run_.logits.get());
  return Status::Ok();
}

Status CudaDevice::Sample(Fence, const std::vector<SampleTask>& tasks, std::vector<SampleOutcome>* outcomes) {
  const CuScope scope(*machine_);
  LLMC_RETURN_IF_ERROR(scope.status());
  if (tasks.empty()) return Finish("A step on the GPU");
  sampling_->set_logits(run_.work.logits.get());
  return sampling_->Draw(tasks, outcomes);
}

Status CudaDevice::Chain(const std::vector<SampleTask>& tasks, const StepBatch& next,
                         const std::vector<DrawnRow>& drawn, Fence* fence, bool* chained) {
  *chained = false;
  LLMC_RETURN_IF_ERROR(machine_->CheckAlive());
  const CuScope scope(*machine_);
  LLMC_RETURN_IF_ERROR(scope.status());
  const Status status = SubmitChain(tasks, next, drawn, chained);
  if (!status.ok()) static_cast<void>(Finish("A step").ok());
  if (*chained) *fence = ++last_fence_;
  return status;
}

Status CudaDevice::SubmitChain(const std::vector<SampleTask>& tasks, const StepBatch& next,
                               const std::vector<DrawnRow>& drawn, bool* chained) {
  sampling_->set_logits(run_.work.logits.get());
  bool begun = false;
  LLMC_RETURN_IF_ERROR(sampling_->Begin(tasks, &begun));
  if (!begun) return Status::Ok();
  uint64_t bytes = 0;
  LLMC_RETURN_IF_ERROR(FillInputs(next, &bytes));
  const StepLayout& layout = run_.graphs->inputs(next.graph);
  sampling_->Mark(drawn, run_.words() + layout.offsets[kInputIds] / kInputWordBytes);
  LLMC_RETURN_IF_ERROR(WriteInputs(run_, bytes));
  sampling_->set_inputs(run_.work.step.get(), layout);
  LLMC_RETURN_IF_ERROR(sampling_->Feed(next.num_tokens));
  LLMC_RETURN_IF_ERROR(Replay(next));
  *chained = true;
  return Status::Ok();
}

Status CudaDevice::SampleChained(Fence, const std::vector<SampleTask>& tasks, std::vector<SampleOutcome>* outcomes,
                                 bool* lost) {
  const CuScope scope(*machine_);
  LLMC_RETURN_IF_ERROR(scope.status());
  return sampling_->End(tasks, outcomes, lost);
}

Status CudaDevice::CopyBlock(uint32_t from, uint32_t to) {
  LLMC_RETURN_IF_ERROR(machine_->CheckAlive());
  const CuScope scope(*machine_);
  LLMC_RETURN_IF_ERROR(scope.status());
  return memory_->CopyBlock(stream_.get(), from, to);
}

Status CudaDevice::ReadBlock(uint32_t block, unsigned char* out) {
  LLMC_RETURN_IF_ERROR(machine_->CheckAlive());
  const CuScope scope(*machine_);
  LLMC_RETURN_IF_ERROR(scope.status());
  LLMC_RETURN_IF_ERROR(TakeBlock());
  LLMC_RETURN_IF_ERROR(memory_->ReadBlock(stream_.get(), block, static_cast<unsigned char*>(block_.get())));
  LLMC_RETURN_IF_ERROR(Finish("Reading a KV block"));
  std::memcpy(out, block_.get(), shape_.kv_block_bytes);
  return Status::Ok();
}

Status CudaDevice::WriteBlock(uint32_t block, const unsigned char* from) {
  LLMC_RETURN_IF_ERROR(machine_->CheckAlive());
  const CuScope scope(*machine_);
  LLMC_RETURN_IF_ERROR(scope.status());
  LLMC_RETURN_IF_ERROR(TakeBlock());
  std::memcpy(block_.get(), from, shape_.kv_block_bytes);
  LLMC_RETURN_IF_ERROR(memory_->WriteBlock(stream_.get(), block, static_cast<const unsigned char*>(block_.get())));
  return Finish("Writing a KV block");
}

Status CudaDevice::TakeBlock() {
  if (block_.get() != nullptr) return Status::Ok();
  return TakePinned(machine_, "a KV block on its way", shape_.kv_block_bytes, &block_);
}

Status CudaDevice::LoadAdapter(uint32_t slot, const std::vector<AdapterMatrix>& matrices) {
  LLMC_RETURN_IF_ERROR(machine_->CheckAlive());
  const CuScope scope(*machine_);
  LLMC_RETURN_IF_ERROR(scope.status());
  return memory_->LoadAdapter(slot, matrices);
}

// Block 0 belongs to no sequence, so it is used for timing copies.
Status CudaDevice::OpenSwapSpace(uint32_t num_places, uint64_t* ns) {
  const CuScope scope(*machine_);
  LLMC_RETURN_IF_ERROR(scope.status());
  LLMC_RETURN_IF_ERROR(memory_->OpenSwapSpace(num_places));
  const auto copy = [this] {
    LLMC_RETURN_IF_ERROR(memory_->SaveBlock(stream_.get(), 0, 0));
    return memory_->LoadBlock(stream_.get(), 0, 0);
  };
  return TimeSwap(copy, [this] { return Finish("Copying KV blocks"); }, ns);
}

Status CudaDevice::SaveBlock(uint32_t block, uint32_t place) {
  LLMC_RETURN_IF_ERROR(machine_->CheckAlive());
  const CuScope scope(*machine_);
  LLMC_RETURN_IF_ERROR(scope.status());
  ++num_saved_;
  return memory_->SaveBlock(stream_.get(), block, place);
}

Status CudaDevice::LoadBlock(uint32_t place, uint32_t block) {
  LLMC_RETURN_IF_ERROR(machine_->CheckAlive());
  const CuScope scope(*machine_);
  LLMC_RETURN_IF_ERROR(scope.status());
  ++num_loaded_;
  return memory_->LoadBlock(stream_.get(), place, block);
}

Status CudaDevice::Begin(const StepBatch& batch) {
  const CuScope scope(*machine_);
  LLMC_RETURN_IF_ERROR(scope.status());
  LLMC_RETURN_IF_ERROR(TakeInputs(batch));
  begun_ = batch.graph;
  return Finish("Copying a step's inputs to the GPU");
}

Status CudaDevice::RunCommand(uint32_t command) {
  LLMC_RETURN_IF_ERROR(CheckCommand(*artifact_, begun_, command));
  const CuScope scope(*machine_);
  LLMC_RETURN_IF_ERROR(scope.status());
  LLMC_RETURN_IF_ERROR(run_.graphs->EnqueueCommand(begun_, command));
  return Finish("A kernel on the GPU");
}

Status CudaDevice::ReadOperand(uint32_t command, uint32_t operand, uint64_t bytes, void* out) {
  LLMC_RETURN_IF_ERROR(CheckOperand(*artifact_, begun_, command, operand, bytes));
  if (bytes == 0) return Status::Ok();
  const CuScope scope(*machine_);
  LLMC_RETURN_IF_ERROR(scope.status());
  const CuPointer from = run_.graphs->place(begun_, command, operand);
  LLMC_RETURN_IF_ERROR(
      machine_->Check("Reading memory of the GPU", (*machine_)->MemcpyToHost(out, from, bytes, stream_.get())));
  return Finish("Reading memory of the GPU");
}

void CudaDevice::GetStats(std::vector<DeviceStat>* out) const {
  const uint64_t graphs = artifact_->graphs().size();
  *out = {{"weight_bytes", memory_->bytes().weights},
          {"offloaded_weight_bytes", memory_->offloaded_bytes()},
          {"kv_pool_bytes", memory_->bytes().pool},
          {"arena_bytes", run_.work.arena_bytes},
          {"graph_bytes", run_.graphs->instance_bytes()},
          {"recorded_graphs", run_.graphs->num_instances()},
          {"launched_graphs", graphs - run_.graphs->num_instances()},
          {"replayed_steps", num_replayed_},
          {"launched_steps", num_launched_},
          {"records_graphs", !options_.graphs.eager},
          {"programs", run_.programs->num_kernels()},
          {"programs_from_ptx", run_.programs->num_built()},
          {"saved_blocks", num_saved_},
          {"loaded_blocks", num_loaded_}};
  GpuSampling::AddStats(sampling_.get(), out);
}

}  // namespace llmc
