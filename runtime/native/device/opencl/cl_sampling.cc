#include "device/opencl/cl_sampling.h"

#include <string>
#include <utility>

#include "device/opencl/cl_arguments.h"

namespace llmc {

ClSampling::~ClSampling() {
  for (cl_kernel kernel : kernels_) {
    if (kernel != nullptr) (*machine_)->ReleaseKernel(kernel);
  }
  ReleaseDrawn();
}

void ClSampling::ReleaseDrawn() {
  if (drawn_ != nullptr) (*machine_)->ReleaseEvent(std::exchange(drawn_, nullptr));
}

Status ClSampling::Make(std::shared_ptr<const ClMachine> machine, const Artifact& artifact, const ClPrograms& programs,
                        const ClMemory& memory, cl_command_queue queue, std::unique_ptr<ClSampling>* out) {
  SampleKernels kernels;
  LLMC_RETURN_IF_ERROR(SampleKernels::Of(artifact, &kernels));
  if (!kernels.any) return Status::Ok();
  std::unique_ptr<ClSampling> made(new ClSampling(std::move(machine), artifact, kernels, queue));
  for (uint32_t stage = 0; stage < kNumSampleStages; ++stage) {
    if (!made->has(static_cast<SampleStage>(stage))) continue;
    LLMC_RETURN_IF_ERROR(programs.Another(kernels.of_stage[stage], &made->kernels_[stage]));
    made->items_[stage] = programs.launch(kernels.of_stage[stage]).items;
  }
  const SampleSizes& sizes = made->sizes();
  LLMC_RETURN_IF_ERROR(memory.Allocate("what is drawn", sizes.upload_bytes, kClMemReadOnly, &made->memories_.upload));
  LLMC_RETURN_IF_ERROR(
      memory.Allocate("drawing tokens", sizes.scratch_bytes, kClMemReadWrite, &made->memories_.scratch));
  LLMC_RETURN_IF_ERROR(memory.Allocate("drawn tokens", sizes.result_bytes, kClMemReadWrite, &made->memories_.result));
  *out = std::move(made);
  return Status::Ok();
}

ClPlace ClSampling::PlaceOf(SampleOperand operand) const {
  if (operand == SampleOperand::kInputIds) return {step_, static_cast<cl_int>(input_ids_at_ / kAlignment)};
  const ClBuffer* memory = memories_.Of(operand);
  return {memory == nullptr ? logits_ : memory->get(), static_cast<cl_int>(sizes().offset(operand) / kAlignment)};
}

Status ClSampling::Launch(SampleStage stage, uint32_t groups) {
  const ClMachine& cl = *machine_;
  const auto index = static_cast<uint32_t>(stage);
  std::vector<ClPlace> places;
  for (const SampleOperand operand : OperandsOf(stage)) places.push_back(PlaceOf(operand));
  cl_mem scalars = stage == SampleStage::kFeed ? step_ : memories_.upload.get();
  LLMC_RETURN_IF_ERROR(SetArguments(cl, kernels_[index], places, scalars));
  const size_t items = items_[index], all = items * groups;
  LLMC_RETURN_IF_CL_ERROR(
      "Drawing tokens on '" + cl.name() + "'",
      cl->EnqueueNDRangeKernel(queue_, kernels_[index], 1, nullptr, &all, &items, 0, nullptr, nullptr));
  return Status::Ok();
}

Status ClSampling::Write(const unsigned char* from, uint64_t bytes) {
  LLMC_RETURN_IF_CL_ERROR(
      "Copying what is drawn to '" + machine_->name() + "'",
      (*machine_)->EnqueueWriteBuffer(queue_, memories_.upload.get(), kClFalse, 0, bytes, from, 0, nullptr, nullptr));
  return Status::Ok();
}

Status ClSampling::Read(uint64_t begin, uint64_t bytes, unsigned char* to) {
  LLMC_RETURN_IF_CL_ERROR(
      "Reading drawn tokens from '" + machine_->name() + "'",
      (*machine_)->EnqueueReadBuffer(queue_, memories_.result.get(), kClFalse, begin, bytes, to, 0, nullptr, nullptr));
  return Status::Ok();
}

Status ClSampling::Close() {
  ReleaseDrawn();
  LLMC_RETURN_IF_CL_ERROR("Drawing tokens on '" + machine_->name() + "'",
                          (*machine_)->EnqueueMarkerWithWaitList(queue_, 0, nullptr, &drawn_));
  return Status::Ok();
}

Status ClSampling::Arrive() {
  const cl_int code = (*machine_)->WaitForEvents(1, &drawn_);
  ReleaseDrawn();
  LLMC_RETURN_IF_CL_ERROR("Drawing tokens on '" + machine_->name() + "'", code);
  return Status::Ok();
}

Status ClSampling::ReadRow(uint32_t row, float* to) {
  const uint64_t bytes = uint64_t{sizes().vocab} * sizeof(float);
  LLMC_RETURN_IF_CL_ERROR(
      "Reading logits from '" + machine_->name() + "'",
      (*machine_)->EnqueueReadBuffer(queue_, logits_, kClTrue, row * bytes, bytes, to, 0, nullptr, nullptr));
  return Status::Ok();
}

Status ClSampling::Finish() {
  LLMC_RETURN_IF_CL_ERROR("Drawing tokens on '" + machine_->name() + "'", (*machine_)->Finish(queue_));
  return Status::Ok();
}

}  // namespace llmc
