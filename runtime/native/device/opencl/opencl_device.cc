#include "device/opencl/opencl_device.h"

#include <algorithm>
#include <utility>

namespace llmc {
namespace {

constexpr uint64_t kWordBytes = sizeof(int32_t);  // of inputs

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
  if (read_ != nullptr) (*machine_)->ReleaseEvent(read_);
}

Status OpenClDevice::Create(std::shared_ptr<const ClMachine> machine, std::shared_ptr<const Artifact> artifact,
                            uint32_t num_blocks, const OpenClDeviceOptions& options,
                            std::unique_ptr<OpenClDevice>* out) {
  LLMC_RETURN_IF_ERROR(CheckNumBlocks(*artifact, num_blocks));
  std::unique_ptr<OpenClDevice> device(new OpenClDevice(std::move(machine), std::move(artifact)));
  LLMC_RETURN_IF_ERROR(device->Load(num_blocks, options));
  *out = std::move(device);
  return Status::Ok();
}

// Programs first: what this device cannot run is refused before anything large is taken.
Status OpenClDevice::Load(uint32_t num_blocks, const OpenClDeviceOptions& options) {
  const Artifact& artifact = *artifact_;
  LLMC_RETURN_IF_ERROR(ClPrograms::Build(machine_, artifact, options.cache_folder, &programs_));
  LLMC_RETURN_IF_ERROR(queue_.Open());
  LLMC_RETURN_IF_ERROR(ClMemory::Make(machine_, artifact, num_blocks, queue_.get(), &memory_));
  LLMC_RETURN_IF_ERROR(
      ClGraphs::Make(machine_, artifact, *programs_, *memory_, queue_.get(), !options.eager, &graphs_));
  uint64_t bytes = 0, samples = 0;
  for (uint32_t g = 0; g < artifact.graphs().size(); ++g) {
    bytes = std::max(bytes, graphs_->inputs(g).bytes);
    samples = std::max<uint64_t>(samples, artifact.graphs()[g].max_samples);
  }
  inputs_.resize(bytes / kWordBytes);
  logits_.resize(samples * artifact.shape().output_width());
  // A driver may leave code unfinished until it is used: nothing is compiled once this returns.
  for (uint32_t g = 0; g < artifact.graphs().size(); ++g) LLMC_RETURN_IF_ERROR(RunEmpty(g));
  programs_->Store();
  return Status::Ok();
}

Status OpenClDevice::WriteInputs(uint64_t bytes) {
  LLMC_RETURN_IF_CL_ERROR("Copying a step's inputs to '" + machine_->name() + "'",
                          (*machine_)->EnqueueWriteBuffer(queue_.get(), memory_->step(), kClFalse, 0, bytes,
                                                          inputs_.data(), 0, nullptr, nullptr));
  return Status::Ok();
}

// What counts rows may lie in the arena, too, where an earlier step has written.
Status OpenClDevice::RunEmpty(uint32_t graph) {
  std::fill(inputs_.begin(), inputs_.end(), 0);
  LLMC_RETURN_IF_ERROR(memory_->ClearArena(queue_.get()));
  LLMC_RETURN_IF_ERROR(WriteInputs(graphs_->inputs(graph).bytes));
  LLMC_RETURN_IF_ERROR(graphs_->Enqueue(graph));
  LLMC_RETURN_IF_CL_ERROR("Replaying a graph on '" + machine_->name() + "'", (*machine_)->Finish(queue_.get()));
  return Status::Ok();
}

Status OpenClDevice::TakeInputs(const StepBatch& batch) {
  LLMC_RETURN_IF_ERROR(CheckSizes(batch));
  LLMC_RETURN_IF_ERROR(CheckBatch(model(), num_blocks(), ViewOf(batch)));
  const StepLayout& inputs = graphs_->inputs(batch.graph);
  FillStep(model(), num_blocks(), batch, inputs, inputs_.data());
  return WriteInputs(inputs.bytes);
}

Status OpenClDevice::Enqueue(const StepBatch& batch, Fence* fence) {
  if (read_ != nullptr) (*machine_)->ReleaseEvent(std::exchange(read_, nullptr));
  *fence = ++last_fence_;
  const Status status = Submit(batch);
  // What was put in before the error may still read the inputs.
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
  LLMC_RETURN_IF_ERROR(graphs_->EnqueueCommand(begun_, command));
  LLMC_RETURN_IF_CL_ERROR("A kernel on '" + machine_->name() + "'", (*machine_)->Finish(queue_.get()));
  return Status::Ok();
}

Status OpenClDevice::ReadOperand(uint32_t command, uint32_t operand, uint64_t bytes, void* out) {
  LLMC_RETURN_IF_ERROR(CheckOperand(*artifact_, begun_, command, operand, bytes));
  if (bytes == 0) return Status::Ok();
  const ClPlace& place = graphs_->place(begun_, command, operand);
  LLMC_RETURN_IF_CL_ERROR(
      "Reading memory of '" + machine_->name() + "'",
      (*machine_)->EnqueueReadBuffer(queue_.get(), place.memory, kClTrue, static_cast<uint64_t>(place.at) * kAlignment,
                                     bytes, out, 0, nullptr, nullptr));
  return Status::Ok();
}

Status OpenClDevice::Submit(const StepBatch& b) {
  const ClMachine& cl = *machine_;
  LLMC_RETURN_IF_ERROR(TakeInputs(b));
  LLMC_RETURN_IF_ERROR(graphs_->Enqueue(b.graph));
  if (b.num_samples != 0) {
    LLMC_RETURN_IF_CL_ERROR("Reading logits from '" + cl.name() + "'",
                            cl->EnqueueReadBuffer(queue_.get(), memory_->logits(), kClFalse, 0,
                                                  uint64_t{b.num_samples} * model().output_width() * sizeof(float),
                                                  logits_.data(), 0, nullptr, &read_));
  }
  LLMC_RETURN_IF_CL_ERROR("Starting a step on '" + cl.name() + "'", cl->Flush(queue_.get()));
  return Status::Ok();
}

Status OpenClDevice::Wait(Fence, const float** logits) {
  const ClMachine& cl = *machine_;
  const cl_int code = read_ != nullptr ? cl->WaitForEvents(1, &read_) : cl->Finish(queue_.get());
  LLMC_RETURN_IF_CL_ERROR("A step on '" + cl.name() + "'", code);
  *logits = logits_.data();
  return Status::Ok();
}

void OpenClDevice::GetStats(std::vector<DeviceStat>* out) const {
  *out = {{"weight_bytes", memory_->weight_bytes()},
          {"kv_pool_bytes", memory_->pool_bytes()},
          {"recorded_graphs", graphs_->recorded() ? artifact_->graphs().size() : 0},
          {"programs", programs_->num_programs()},
          {"cached_programs", programs_->num_cached()}};
}

}  // namespace llmc
