#include "device/cuda/cuda_device.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace llmc {

Status CudaDevice::Create(const CuMachinePtr& machine, std::shared_ptr<const Artifact> artifact,
                          const LoadOptions& load, const CudaOptions& options, std::unique_ptr<CudaDevice>* out) {
  std::unique_ptr<CudaDevice> device(new CudaDevice(machine, std::move(artifact), load.collective, options));
  LLMC_RETURN_IF_ERROR(device->InScope([&] { return MakeEvent(machine, &device->done_); }));
  LLMC_RETURN_IF_ERROR(device->Load({load.num_blocks, load.num_states}));
  *out = std::move(device);
  return Status::Ok();
}

Status CudaDevice::LoadPrograms(const Artifact& artifact, const CuPrograms* known,
                                std::shared_ptr<const CuPrograms>* out) const {
  return CuPrograms::Load(machine_, artifact, known, out);
}

Status CudaDevice::JoinRanks() {
  if (ranks_->ranks_of_stage() == 1) return Status::Ok();
  return CuNccl::Join(machine_, choice_, ranks_, &nccl_, &refusal_);
}

Status CudaDevice::MakeSampling(std::unique_ptr<CuSampling>* out) const {
  return CuSampling::Make(machine_, artifact(), run_.programs, queue_.get(), out);
}

Status CudaDevice::MakeGraphs(const Artifact& artifact, Runner* runner) const {
  for (CuPinned& inputs : runner->inputs) {
    LLMC_RETURN_IF_ERROR(TakePinned(machine_, "inputs", runner->work.step_bytes, &inputs));
  }
  LLMC_RETURN_IF_ERROR(TakePinned(machine_, "logits", runner->work.logit_bytes, &runner->logits));
  if (runner->work.hidden_bytes > 0) {
    LLMC_RETURN_IF_ERROR(TakePinned(machine_, "hidden states", runner->work.hidden_bytes, &runner->hidden));
    std::memset(runner->hidden.get(), 0, runner->work.hidden_bytes);
  }
  const bool early = early_ && machine_->launches_early() && runner->programs->all_await();
  return CuGraphs::Make(machine_, artifact, *runner->programs, *memory_, runner->work, queue_.get(), options().graphs,
                        early, ranks_, nccl_, &runner->graphs);
}

Status CudaDevice::Finish(const char* doing) const {
  CuResult code = kCuSuccess;
  LLMC_RETURN_IF_ERROR(AwaitStream(*machine_, nccl_.get(), queue_.get(), &code));
  return code == kCuSuccess ? Status::Ok() : machine_->Check((std::string(doing) + " on the GPU").c_str(), code);
}

Status CudaDevice::WriteInputs(const Runner& runner, uint64_t bytes) const {
  return machine_->Check(
      "Copying a step's inputs to the GPU",
      (*machine_)->MemcpyToDevice(runner.work.step.get(), runner.inputs[runner.filled].get(), bytes, queue_.get()));
}

Status CudaDevice::WriteHidden(const Runner& runner, uint64_t bytes) const {
  return machine_->Check(
      "Copying hidden states to the GPU",
      (*machine_)->MemcpyToDevice(runner.work.hidden.get(), runner.hidden.get(), bytes, queue_.get()));
}

Status CudaDevice::CopyLogits(uint32_t num_samples) {
  const uint64_t bytes = uint64_t{num_samples} * model().output_width() * sizeof(float);
  return machine_->Check("Reading logits from the GPU",
                         (*machine_)->MemcpyToHost(run_.logits.get(), run_.work.logits.get(), bytes, queue_.get()));
}

// Where the host draws, it reads the logits of every step: the copy is enqueued behind it. Of ranks, the first draws.
Status CudaDevice::Start(uint32_t num_samples) {
  const bool host_draws = !samples() && (ranks_ == nullptr || ranks_->rank() == 0);
  if (num_samples != 0 && host_draws) LLMC_RETURN_IF_ERROR(CopyLogits(num_samples));
  return machine_->Check("Starting a step", (*machine_)->EventRecord(done_.get(), queue_.get()));
}

Status CudaDevice::ReadLogits(uint32_t num_samples, const float** logits) {
  if (samples() && num_samples != 0) {
    LLMC_RETURN_IF_ERROR(CopyLogits(num_samples));
    LLMC_RETURN_IF_ERROR(Finish("A step"));
  }
  CuResult code = kCuSuccess;
  if (nccl_ != nullptr) {
    LLMC_RETURN_IF_ERROR(nccl_->Await([&] { return (*machine_)->EventQuery(done_.get()); }, &code));
  } else {
    code = (*machine_)->EventSynchronize(done_.get());
  }
  LLMC_RETURN_IF_ERROR(machine_->Check("A step on the GPU", code));
  *logits = static_cast<const float*>(run_.logits.get());
  return Status::Ok();
}

Status CudaDevice::ReadMemory(const CuPointer& from, uint64_t bytes, void* out) const {
  LLMC_RETURN_IF_ERROR(
      machine_->Check("Reading memory of the GPU", (*machine_)->MemcpyToHost(out, from, bytes, queue_.get())));
  return Finish("Reading memory");
}

void CudaDevice::AddProgramStats(std::vector<DeviceStat>* out) const {
  out->push_back({"programs", run_.programs->num_kernels()});
  out->push_back({"programs_from_ptx", run_.programs->num_built()});
  out->push_back({"dependent_launches", run_.graphs->early()});
  out->push_back({"upload_ns", memory_->upload_ns()});
  if (ranks_ == nullptr || ranks_->ranks_of_stage() == 1) return;
  out->push_back({"nccl_ranks", nccl_ == nullptr ? 0 : nccl_->num_ranks()});
  out->push_back({"nccl_refusal", static_cast<uint64_t>(refusal_)});
}

Status CudaDevice::ReadEntry(PoolKind kind, uint32_t entry, unsigned char* out) {
  LLMC_RETURN_IF_ERROR(TakeEntry(kind));
  void* host = on_way_[kind].get();
  LLMC_RETURN_IF_ERROR(memory_->Read(queue_.get(), kind, entry, static_cast<unsigned char*>(host)));
  LLMC_RETURN_IF_ERROR(Finish(TextOf(kind, "Reading a KV block", "Reading states")));
  std::memcpy(out, host, memory_->entry_bytes(kind));
  return Status::Ok();
}

Status CudaDevice::WriteEntry(PoolKind kind, uint32_t entry, const unsigned char* from) {
  LLMC_RETURN_IF_ERROR(TakeEntry(kind));
  void* host = on_way_[kind].get();
  std::memcpy(host, from, memory_->entry_bytes(kind));
  LLMC_RETURN_IF_ERROR(memory_->Write(queue_.get(), kind, entry, static_cast<const unsigned char*>(host)));
  return Finish(TextOf(kind, "Writing a KV block", "Writing states"));
}

Status CudaDevice::TakeEntry(PoolKind kind) {
  if (on_way_[kind].get() != nullptr) return Status::Ok();
  const uint64_t bytes = std::max<uint64_t>(memory_->entry_bytes(kind), 1);
  return TakePinned(machine_, TextOf(kind, "a KV block on its way", "states on their way"), bytes, &on_way_[kind]);
}

Status CudaDevice::LoadAdapter(uint32_t slot, const std::vector<AdapterMatrix>& matrices) {
  return InScope([&] { return memory_->LoadAdapter(slot, matrices); });
}

}  // namespace llmc
