#include "device/cuda/cu_sampling.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "device/cuda/cu_arguments.h"

namespace llmc {

Status CuSampling::Make(const CuMachinePtr& machine, const Artifact& artifact,
                        std::shared_ptr<const CuPrograms> programs, CuStreamHandle stream,
                        std::unique_ptr<CuSampling>* out) {
  SampleKernels kernels;
  LLMC_RETURN_IF_ERROR(SampleKernels::Of(artifact, &kernels));
  if (!kernels.any) return Status::Ok();
  std::unique_ptr<CuSampling> made(new CuSampling(machine, artifact, kernels, stream));
  for (uint32_t stage = 0; stage < kNumSampleStages; ++stage) {
    if (!made->has(static_cast<SampleStage>(stage))) continue;
    made->kernels_[stage] = programs->kernel(kernels.of_stage[stage]);
    made->items_[stage] = programs->launch(kernels.of_stage[stage]).items;
  }
  const SampleSizes& sizes = made->sizes();
  LLMC_RETURN_IF_ERROR(TakeMemory(machine, "what is drawn", sizes.upload_bytes, &made->memories_.upload));
  LLMC_RETURN_IF_ERROR(TakeMemory(machine, "drawing tokens", sizes.scratch_bytes, &made->memories_.scratch));
  LLMC_RETURN_IF_ERROR(TakeMemory(machine, "drawn tokens", sizes.result_bytes, &made->memories_.result));
  LLMC_RETURN_IF_ERROR(TakePinned(machine, "what is drawn", sizes.upload_bytes, &made->written_));
  const uint64_t read = std::max(sizes.result_bytes, sizes.vocab * uint64_t{sizeof(float)});
  LLMC_RETURN_IF_ERROR(TakePinned(machine, "drawn tokens", read, &made->read_));
  LLMC_RETURN_IF_ERROR(MakeEvent(machine, &made->drawn_));
  made->arriving_.reserve(kNumSampleStages);
  made->programs_ = std::move(programs);
  *out = std::move(made);
  return Status::Ok();
}

CuPointer CuSampling::PlaceOf(SampleOperand operand) const {
  if (operand == SampleOperand::kInputIds) return input_ids_;
  const CuBuffer* memory = memories_.Of(operand);
  return memory == nullptr ? logits_ : memory->get() + sizes().offset(operand);
}

Status CuSampling::Launch(SampleStage stage, uint32_t groups) {
  std::vector<CuPointer> places;
  for (const SampleOperand operand : OperandsOf(stage)) places.push_back(PlaceOf(operand));
  const CuPointer scalars = stage == SampleStage::kFeed ? step_ : memories_.upload.get();
  CuArguments arguments(places, scalars);
  const auto index = static_cast<uint32_t>(stage);
  return machine_->Check("Drawing tokens on the GPU",
                         (*machine_)->LaunchKernel(kernels_[index], groups, 1, 1, items_[index], 1, 1, 0, stream_,
                                                   arguments.get(), nullptr));
}

Status CuSampling::Write(const unsigned char* from, uint64_t bytes) {
  arriving_.clear();  // of draws that nobody waited for
  std::memcpy(written_.get(), from, bytes);
  return machine_->Check("Copying what is drawn to the GPU",
                         (*machine_)->MemcpyToDevice(memories_.upload.get(), written_.get(), bytes, stream_));
}

Status CuSampling::Read(uint64_t begin, uint64_t bytes, unsigned char* to) {
  auto* pinned = static_cast<unsigned char*>(read_.get()) + begin;
  arriving_.push_back({pinned, to, bytes});
  return machine_->Check("Reading drawn tokens from the GPU",
                         (*machine_)->MemcpyToHost(pinned, memories_.result.get() + begin, bytes, stream_));
}

Status CuSampling::ReadRow(uint32_t row, float* to) {
  const uint64_t bytes = uint64_t{sizes().vocab} * sizeof(float);
  LLMC_RETURN_IF_ERROR(machine_->Check("Reading logits from the GPU",
                                       (*machine_)->MemcpyToHost(read_.get(), logits_ + row * bytes, bytes, stream_)));
  LLMC_RETURN_IF_ERROR(Finish());
  std::memcpy(to, read_.get(), bytes);
  return Status::Ok();
}

Status CuSampling::Close() {
  return machine_->Check("Drawing tokens on the GPU", (*machine_)->EventRecord(drawn_.get(), stream_));
}

Status CuSampling::Arrive() {
  const Status status = machine_->Check("Drawing tokens on the GPU", (*machine_)->EventSynchronize(drawn_.get()));
  if (status.ok()) TakeArrived();
  arriving_.clear();
  return status;
}

Status CuSampling::Finish() {
  const Status status = machine_->Check("Drawing tokens on the GPU", (*machine_)->StreamSynchronize(stream_));
  if (status.ok()) TakeArrived();
  arriving_.clear();
  return status;
}

void CuSampling::TakeArrived() {
  for (const Arriving& one : arriving_) std::memcpy(one.to, one.pinned, one.bytes);
}

}  // namespace llmc
