#include "device/opencl/cl_sampling.h"

#include <string>

namespace llmc {

ClSampling::~ClSampling() {
  for (cl_kernel kernel : kernels_) {
    if (kernel != nullptr) (*machine_)->ReleaseKernel(kernel);
  }
}

Status ClSampling::Make(std::shared_ptr<const ClMachine> machine, const Artifact& artifact, const ClPrograms& programs,
                        const ClMemory& memory, cl_command_queue queue, std::unique_ptr<ClSampling>* out) {
  SampleKernels kernels;
  LLMC_RETURN_IF_ERROR(SampleKernels::Of(artifact, &kernels));
  if (!kernels.any) return Status::Ok();
  std::unique_ptr<ClSampling> made(new ClSampling(std::move(machine), artifact, kernels, queue));
  for (uint32_t stage = 0; stage < kNumSampleStages; ++stage) {
    LLMC_RETURN_IF_ERROR(programs.Another(kernels.of_stage[stage], &made->kernels_[stage]));
    made->items_[stage] = programs.launch(kernels.of_stage[stage]).items;
  }
  const SampleSizes& sizes = made->sizes();
  LLMC_RETURN_IF_ERROR(memory.Allocate("what is drawn", sizes.upload_bytes, kClMemReadOnly, &made->upload_));
  LLMC_RETURN_IF_ERROR(memory.Allocate("drawing tokens", sizes.scratch_bytes, kClMemReadWrite, &made->scratch_));
  LLMC_RETURN_IF_ERROR(memory.Allocate("drawn tokens", sizes.result_bytes, kClMemReadWrite, &made->result_));
  *out = std::move(made);
  return Status::Ok();
}

cl_mem ClSampling::MemoryOf(SampleOperand operand) const {
  if (operand == SampleOperand::kLogits) return logits_;
  return (operand < SampleOperand::kLogits ? upload_ : operand < SampleOperand::kResults ? scratch_ : result_).get();
}

Status ClSampling::Launch(SampleStage stage, uint32_t groups) {
  const ClMachine& cl = *machine_;
  cl_kernel kernel = kernels_[static_cast<uint32_t>(stage)];
  cl_uint index = 0;
  cl_int code = kClSuccess;
  const auto set = [&](size_t bytes, const void* value) {
    const cl_int set_code = cl->SetKernelArg(kernel, index++, bytes, value);
    if (code == kClSuccess) code = set_code;
  };
  for (const SampleOperand operand : OperandsOf(stage)) {
    cl_mem memory = MemoryOf(operand);
    set(sizeof(cl_mem), static_cast<const void*>(&memory));
  }
  for (const SampleOperand operand : OperandsOf(stage)) {
    const auto at = static_cast<cl_int>(sizes().offset(operand) / kAlignment);
    set(sizeof(at), &at);
  }
  cl_mem scalars = upload_.get();
  set(sizeof(cl_mem), static_cast<const void*>(&scalars));
  LLMC_RETURN_IF_CL_ERROR("Giving a kernel its arguments on '" + cl.name() + "'", code);
  const size_t items = items_[static_cast<uint32_t>(stage)], all = items * groups;
  LLMC_RETURN_IF_CL_ERROR("Drawing tokens on '" + cl.name() + "'",
                          cl->EnqueueNDRangeKernel(queue_, kernel, 1, nullptr, &all, &items, 0, nullptr, nullptr));
  return Status::Ok();
}

Status ClSampling::Write(const unsigned char* from, uint64_t bytes) {
  LLMC_RETURN_IF_CL_ERROR(
      "Copying what is drawn to '" + machine_->name() + "'",
      (*machine_)->EnqueueWriteBuffer(queue_, upload_.get(), kClFalse, 0, bytes, from, 0, nullptr, nullptr));
  return Status::Ok();
}

Status ClSampling::Read(uint64_t begin, uint64_t bytes, unsigned char* to) {
  LLMC_RETURN_IF_CL_ERROR(
      "Reading drawn tokens from '" + machine_->name() + "'",
      (*machine_)->EnqueueReadBuffer(queue_, result_.get(), kClFalse, begin, bytes, to, 0, nullptr, nullptr));
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
