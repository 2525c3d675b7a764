#include "device/opencl/opencl_device.h"

#include <utility>

namespace llmc {

Status OpenClDevice::Create(std::shared_ptr<const ClMachine> machine, std::shared_ptr<const Artifact> artifact,
                            const LoadOptions& load, const OpenClDeviceOptions& options,
                            std::unique_ptr<OpenClDevice>* out) {
  std::unique_ptr<OpenClDevice> device(
      new OpenClDevice(std::move(machine), std::move(artifact), load.collective, options));
  LLMC_RETURN_IF_ERROR(device->Load({load.num_blocks, load.num_states}));
  *out = std::move(device);
  return Status::Ok();
}

Status OpenClDevice::LoadPrograms(const Artifact& artifact, const ClPrograms* known,
                                  std::shared_ptr<const ClPrograms>* out) const {
  std::unique_ptr<ClPrograms> built;
  LLMC_RETURN_IF_ERROR(ClPrograms::Build(machine_, artifact, cache_folder_, known, &built));
  *out = std::move(built);
  return Status::Ok();
}

Status OpenClDevice::OpenQueue(OpenClParts::Queue* out) const {
  cl_int code = kClSuccess;
  cl_command_queue queue = (*machine_)->CreateCommandQueue(machine_->context(), machine_->device(), 0, &code);
  LLMC_RETURN_IF_CL_ERROR("Opening a queue of '" + machine_->name() + "'", code);
  *out = OpenClParts::Queue(machine_, queue);
  return Status::Ok();
}

Status OpenClDevice::MakeSampling(std::unique_ptr<ClSampling>* out) const {
  return ClSampling::Make(machine_, artifact(), *run_.programs, *memory_, queue_.get(), out);
}

Status OpenClDevice::MakeGraphs(const Artifact& artifact, Runner* runner) const {
  for (auto& inputs : runner->inputs) inputs.resize(runner->work.step_bytes / sizeof(int32_t));
  runner->logits.resize(runner->work.logit_bytes / sizeof(float));
  runner->hidden.resize(runner->work.hidden_bytes / sizeof(float));
  const uint32_t in_flight = overlap() == Overlap::kChained ? 2 : 1;
  return ClGraphs::Make(machine_, artifact, *runner->programs, *memory_, runner->work, queue_.get(), in_flight,
                        options().graphs, ranks_, &runner->graphs);
}

Status OpenClDevice::WriteInputs(const Runner& runner, uint64_t bytes) const {
  LLMC_RETURN_IF_CL_ERROR("Copying a step's inputs to '" + machine_->name() + "'",
                          (*machine_)->EnqueueWriteBuffer(queue_.get(), runner.work.step.get(), kClFalse, 0, bytes,
                                                          runner.inputs[runner.filled].data(), 0, nullptr, nullptr));
  return Status::Ok();
}

Status OpenClDevice::WriteHidden(const Runner& runner, uint64_t bytes) const {
  LLMC_RETURN_IF_CL_ERROR("Copying hidden states to '" + machine_->name() + "'",
                          (*machine_)->EnqueueWriteBuffer(queue_.get(), runner.work.hidden.get(), kClFalse, 0, bytes,
                                                          runner.hidden.data(), 0, nullptr, nullptr));
  return Status::Ok();
}

Status OpenClDevice::Start(uint32_t) {
  LLMC_RETURN_IF_CL_ERROR("Starting a step on '" + machine_->name() + "'", (*machine_)->Flush(queue_.get()));
  return Status::Ok();
}

Status OpenClDevice::ReadLogits(uint32_t num_samples, const float** logits) {
  const uint64_t bytes = uint64_t{num_samples} * model().output_width() * sizeof(float);
  if (bytes == 0) LLMC_RETURN_IF_ERROR(Finish("A step"));
  if (bytes != 0) {
    LLMC_RETURN_IF_CL_ERROR("A step on '" + machine_->name() + "'",
                            (*machine_)->EnqueueReadBuffer(queue_.get(), run_.work.logits.get(), kClTrue, 0, bytes,
                                                           run_.logits.data(), 0, nullptr, nullptr));
  }
  *logits = run_.logits.data();
  return Status::Ok();
}

Status OpenClDevice::ReadMemory(const ClPlace& from, uint64_t bytes, void* out) const {
  LLMC_RETURN_IF_CL_ERROR(
      "Reading memory of '" + machine_->name() + "'",
      (*machine_)->EnqueueReadBuffer(queue_.get(), from.memory, kClTrue, static_cast<uint64_t>(from.at) * kAlignment,
                                     bytes, out, 0, nullptr, nullptr));
  return Status::Ok();
}

Status OpenClDevice::Finish(const char* doing) const {
  LLMC_RETURN_IF_CL_ERROR(doing + (" on '" + machine_->name() + "'"), (*machine_)->Finish(queue_.get()));
  return Status::Ok();
}

void OpenClDevice::AddProgramStats(std::vector<DeviceStat>* out) const {
  out->push_back({"programs", run_.programs->num_programs()});
  out->push_back({"cached_programs", run_.programs->num_cached()});
}

}  // namespace llmc
