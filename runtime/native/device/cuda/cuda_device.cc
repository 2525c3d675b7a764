#include "device/cuda/cuda_device.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace llmc {

Status CudaDevice::Create(const CuMachinePtr& machine, std::shared_ptr<const Artifact> artifact, uint32_t num_blocks,
                          const CudaDeviceOptions& options, std::unique_ptr<CudaDevice>* out) {
  LLMC_RETURN_IF_ERROR(CheckNumBlocks(*artifact, num_blocks));
  const CuScope scope(*machine);
  LLMC_RETURN_IF_ERROR(scope.status());
  std::unique_ptr<CudaDevice> device(new CudaDevice(machine, std::move(artifact)));
  LLMC_RETURN_IF_ERROR(device->Load(num_blocks, options));
  *out = std::move(device);
  return Status::Ok();
}

// Programs first: what this device cannot run is refused before anything large is taken.
Status CudaDevice::Load(uint32_t num_blocks, const CudaDeviceOptions& options) {
  const Artifact& artifact = *artifact_;
  LLMC_RETURN_IF_ERROR(CuPrograms::Load(machine_, artifact, &programs_));
  LLMC_RETURN_IF_ERROR(MakeStream(machine_, &stream_));
  LLMC_RETURN_IF_ERROR(MakeEvent(machine_, &done_));
  LLMC_RETURN_IF_ERROR(CuMemory::Make(machine_, artifact, num_blocks, stream_.get(), &memory_));
  LLMC_RETURN_IF_ERROR(TakePinned(machine_, "inputs", memory_->bytes().step, &inputs_));
  LLMC_RETURN_IF_ERROR(TakePinned(machine_, "logits", memory_->bytes().logits, &logits_));
  LLMC_RETURN_IF_ERROR(
      CuGraphs::Make(machine_, artifact, *programs_, *memory_, stream_.get(), options.graphs, &graphs_));
  if (options.sample) {
    LLMC_RETURN_IF_ERROR(
        CuSampling::Make(machine_, artifact, *programs_, memory_->logits(), stream_.get(), &sampling_));
  }
  // A driver may leave code where it is until it is used: nothing is loaded, or taken, once this returns.
  for (uint32_t g = 0; g < artifact.graphs().size(); ++g) LLMC_RETURN_IF_ERROR(RunEmpty(g));
  return sampling_ == nullptr ? Status::Ok() : sampling_->RunEmpty();
}

Status CudaDevice::Finish(const char* doing) const {
  return machine_->Check(doing, (*machine_)->StreamSynchronize(stream_.get()));
}

Status CudaDevice::WriteInputs(uint64_t bytes) {
  return machine_->Check("Copying a step's inputs to the GPU",
                         (*machine_)->MemcpyToDevice(memory_->step(), inputs_.get(), bytes, stream_.get()));
}

// What counts rows may lie in the arena, too, where an earlier step has written.
Status CudaDevice::RunEmpty(uint32_t graph) {
  const uint64_t bytes = graphs_->inputs(graph).bytes;
  std::memset(inputs_.get(), 0, bytes);
  LLMC_RETURN_IF_ERROR(memory_->ClearArena(stream_.get()));
  LLMC_RETURN_IF_ERROR(WriteInputs(bytes));
  LLMC_RETURN_IF_ERROR(graphs_->Enqueue(graph));
  return Finish("Replaying a graph");
}

void CudaDevice::Visit(uint32_t graph) {
  const CuScope scope(*machine_);
  if (machine_->CheckAlive().ok() && scope.status().ok()) static_cast<void>(RunEmpty(graph).ok());
}

Status CudaDevice::TakeInputs(const StepBatch& batch) {
  LLMC_RETURN_IF_ERROR(CheckSizes(batch));
  LLMC_RETURN_IF_ERROR(CheckBatch(model(), num_blocks(), ViewOf(batch)));
  const StepLayout& layout = graphs_->inputs(batch.graph);
  FillStep(model(), num_blocks(), batch, layout, static_cast<int32_t*>(inputs_.get()));
  return WriteInputs(layout.bytes);
}

Status CudaDevice::Enqueue(const StepBatch& batch, Fence* fence) {
  *fence = ++last_fence_;
  LLMC_RETURN_IF_ERROR(machine_->CheckAlive());
  const CuScope scope(*machine_);
  LLMC_RETURN_IF_ERROR(scope.status());
  const Status status = Submit(batch);
  // What was put in before the error may still read the inputs.
  if (!status.ok()) static_cast<void>(Finish("A step").ok());
  return status;
}

Status CudaDevice::Submit(const StepBatch& batch) {
  const CuMachine& cuda = *machine_;
  LLMC_RETURN_IF_ERROR(TakeInputs(batch));
  LLMC_RETURN_IF_ERROR(graphs_->Enqueue(batch.graph));
  num_samples_ = batch.num_samples;
  if (batch.num_samples != 0 && !samples()) {
    const uint64_t bytes = uint64_t{batch.num_samples} * model().output_width() * sizeof(float);
    LLMC_RETURN_IF_ERROR(cuda.Check("Reading logits from the GPU",
                                    cuda->MemcpyToHost(logits_.get(), memory_->logits(), bytes, stream_.get())));
  }
  LLMC_RETURN_IF_ERROR(cuda.Check("Starting a step", cuda->EventRecord(done_.get(), stream_.get())));
  ++(graphs_->has_instance(batch.graph) ? num_replayed_ : num_launched_);
  return Status::Ok();
}

Status CudaDevice::Wait(Fence, const float** logits) {
  const CuScope scope(*machine_);
  LLMC_RETURN_IF_ERROR(scope.status());
  if (samples() && num_samples_ != 0) {
    const uint64_t bytes = uint64_t{num_samples_} * model().output_width() * sizeof(float);
    LLMC_RETURN_IF_ERROR(
        machine_->Check("Reading logits from the GPU",
                        (*machine_)->MemcpyToHost(logits_.get(), memory_->logits(), bytes, stream_.get())));
    LLMC_RETURN_IF_ERROR(Finish("A step on the GPU"));
  }
  LLMC_RETURN_IF_ERROR(machine_->Check("A step on the GPU", (*machine_)->EventSynchronize(done_.get())));
  *logits = static_cast<const float*>(logits_.get());
  return Status::Ok();
}

Status CudaDevice::Sample(Fence, const std::vector<SampleTask>& tasks, std::vector<SampleOutcome>* outcomes) {
  const CuScope scope(*machine_);
  LLMC_RETURN_IF_ERROR(scope.status());
  return tasks.empty() ? Finish("A step on the GPU") : sampling_->Draw(tasks, outcomes);
}

Status CudaDevice::CopyBlock(uint32_t from, uint32_t to) {
  LLMC_RETURN_IF_ERROR(machine_->CheckAlive());
  const CuScope scope(*machine_);
  LLMC_RETURN_IF_ERROR(scope.status());
  return memory_->CopyBlock(stream_.get(), from, to);
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
  LLMC_RETURN_IF_ERROR(graphs_->EnqueueCommand(begun_, command));
  return Finish("A kernel on the GPU");
}

Status CudaDevice::ReadOperand(uint32_t command, uint32_t operand, uint64_t bytes, void* out) {
  LLMC_RETURN_IF_ERROR(CheckOperand(*artifact_, begun_, command, operand, bytes));
  if (bytes == 0) return Status::Ok();
  const CuScope scope(*machine_);
  LLMC_RETURN_IF_ERROR(scope.status());
  const CuPointer from = graphs_->place(begun_, command, operand);
  LLMC_RETURN_IF_ERROR(
      machine_->Check("Reading memory of the GPU", (*machine_)->MemcpyToHost(out, from, bytes, stream_.get())));
  return Finish("Reading memory of the GPU");
}

void CudaDevice::GetStats(std::vector<DeviceStat>* out) const {
  const uint64_t graphs = artifact_->graphs().size();
  *out = {{"weight_bytes", memory_->bytes().weights},
          {"kv_pool_bytes", memory_->bytes().pool},
          {"arena_bytes", memory_->bytes().arena},
          {"graph_bytes", graphs_->instance_bytes()},
          {"recorded_graphs", graphs_->num_instances()},
          {"launched_graphs", graphs - graphs_->num_instances()},
          {"replayed_steps", num_replayed_},
          {"launched_steps", num_launched_},
          {"programs", programs_->num_kernels()},
          {"programs_from_ptx", programs_->num_built()},
          {"drawn_on_device", sampling_ == nullptr ? 0 : sampling_->num_on_device()},
          {"drawn_on_host", sampling_ == nullptr ? 0 : sampling_->num_on_host()}};
}

}  // namespace llmc
