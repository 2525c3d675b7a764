#include "device/cuda/cu_weight_stream.h"

#include <utility>

namespace llmc {

Status CuWeightStream::Make(CuMachinePtr machine, const CuMemory& memory, size_t most_loads,
                            std::unique_ptr<CuWeightStream>* out) {
  std::unique_ptr<CuWeightStream> made(new CuWeightStream(std::move(machine), memory));
  LLMC_RETURN_IF_ERROR(MakeStream(made->machine_, &made->copies_));
  LLMC_RETURN_IF_ERROR(MakeEvent(made->machine_, &made->read_));
  made->loaded_.resize(most_loads);
  for (CuEvent& event : made->loaded_) LLMC_RETURN_IF_ERROR(MakeEvent(made->machine_, &event));
  *out = std::move(made);
  return Status::Ok();
}

Status CuWeightStream::Copy(const RingLoad& load, CuStreamHandle stream) const {
  for (const RingLoad::Copy& copy : load.copies) {
    LLMC_RETURN_IF_ERROR(machine_->Check(
        "Streaming weights to the GPU",
        (*machine_)->MemcpyToDevice(memory_.ring() + copy.to, memory_.host_memory() + copy.from, copy.bytes, stream)));
  }
  return Status::Ok();
}

Status CuWeightStream::AwaitKernels(CuStreamHandle kernels) const {
  LLMC_RETURN_IF_ERROR(machine_->Check("Streaming weights to the GPU", (*machine_)->EventRecord(read_.get(), kernels)));
  return machine_->Check("Streaming weights to the GPU",
                         (*machine_)->StreamWaitEvent(copies_.get(), read_.get(), kCuWaitDefault));
}

Status CuWeightStream::Run::EnqueueBehind(int64_t command) {
  for (; enqueued_ < loads_.size(); ++enqueued_) {
    const RingLoad& load = loads_[enqueued_];
    if (load.after != RingLoad::kNone && load.after > command) break;
    LLMC_RETURN_IF_ERROR(by_.Copy(load, by_.copies_.get()));
    const CuMachine& cuda = *by_.machine_;
    LLMC_RETURN_IF_ERROR(
        cuda.Check("Streaming weights to the GPU", cuda->EventRecord(by_.loaded_[enqueued_].get(), by_.copies_.get())));
  }
  return Status::Ok();
}

Status CuWeightStream::Run::Begin() {
  LLMC_RETURN_IF_ERROR(by_.AwaitKernels(kernels_));
  return EnqueueBehind(-1);
}

Status CuWeightStream::Run::Before(size_t command, bool* waits) {
  *waits = awaited_ < loads_.size() && loads_[awaited_].first == command;
  if (!*waits) return Status::Ok();
  const CuMachine& cuda = *by_.machine_;
  return cuda.Check("Streaming weights to the GPU",
                    cuda->StreamWaitEvent(kernels_, by_.loaded_[awaited_++].get(), kCuWaitDefault));
}

Status CuWeightStream::Run::Behind(size_t command) {
  if (enqueued_ == loads_.size() || loads_[enqueued_].after != command) return Status::Ok();
  LLMC_RETURN_IF_ERROR(by_.AwaitKernels(kernels_));
  return EnqueueBehind(static_cast<int64_t>(command));
}

}  // namespace llmc
