// CudaDevice: an artifact's graphs on one GPU, one step at a time in a stream.
#pragma once
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "artifact/artifact.h"
#include "device/cuda/cu_graphs.h"
#include "device/cuda/cu_machine.h"
#include "device/cuda/cu_memory.h"
#include "device/cuda/cu_nccl.h"
#include "device/cuda/cu_programs.h"
#include "device/cuda/cu_sampling.h"
#include "device/gpu/gpu_device.h"

namespace llmc {

struct CudaParts {
  using Machine = CuMachine;
  using Scope = CuScope;
  using Queue = CuStream;
  using Programs = CuPrograms;
  using Memory = CuMemory;
  using Work = CuWork;
  using Graphs = CuGraphs;
  using Sampling = CuSampling;
  using Place = CuPointer;
  using Inputs = CuPinned;
  using Logits = CuPinned;
};

struct CudaOptions : GpuOptions {
  NcclChoice nccl;
  bool early = true;  // kernels begin while those before them end, where they wait for them
};

class CudaDevice final : public GpuDevice<CudaParts> {
 public:
  static Status Create(const CuMachinePtr& machine, std::shared_ptr<const Artifact> artifact, const LoadOptions& load,
                       const CudaOptions& options, std::unique_ptr<CudaDevice>* out);
  ~CudaDevice() override { Drain(); }

  Status LoadAdapter(uint32_t slot, const std::vector<AdapterMatrix>& matrices) override;

 private:
  CudaDevice(CuMachinePtr machine, std::shared_ptr<const Artifact> artifact, std::shared_ptr<Collective> ranks,
             const CudaOptions& options)
      : GpuDevice(std::move(machine), std::move(artifact), std::move(ranks), static_cast<const GpuOptions&>(options)),
        choice_(options.nccl),
        early_(options.early) {}
  Status LoadPrograms(const Artifact& artifact, const CuPrograms* known,
                      std::shared_ptr<const CuPrograms>* out) const override;
  Status OpenQueue(CuStream* out) const override { return MakeStream(machine_, out); }
  Status JoinRanks() override;
  Status ReadEntry(PoolKind kind, uint32_t entry, unsigned char* out) override;
  Status WriteEntry(PoolKind kind, uint32_t entry, const unsigned char* from) override;
  Status MakeSampling(std::unique_ptr<CuSampling>* out) const override;
  Status MakeGraphs(const Artifact& artifact, Runner* runner) const override;
  int32_t* WordsOf(Runner* runner) const override {
    return static_cast<int32_t*>(runner->inputs[runner->filled].get());
  }
  Status WriteInputs(const Runner& runner, uint64_t bytes) const override;
  float* HiddenOf(Runner& runner) const override { return static_cast<float*>(runner.hidden.get()); }
  Status WriteHidden(const Runner& runner, uint64_t bytes) const override;
  Status Start(uint32_t num_samples) override;
  Status ReadLogits(uint32_t num_samples, const float** logits) override;
  Status ReadMemory(const CuPointer& from, uint64_t bytes, void* out) const override;
  Status Finish(const char* doing) const override;
  bool records() const override { return !options().graphs.eager; }
  void AddProgramStats(std::vector<DeviceStat>* out) const override;

  // Enqueues a copy of a step's logits to the host.
  Status CopyLogits(uint32_t num_samples);
  // Allocates on_way_ of that kind at the first call.
  Status TakeEntry(PoolKind kind);

  const NcclChoice choice_;
  const bool early_;
  std::shared_ptr<const CuNccl> nccl_;  // nullptr: the host exchanges what ranks have
  NcclRefusal refusal_ = NcclRefusal::kNone;
  OfKinds<CuPinned> on_way_;  // an entry between host and GPU: copies from other memory of the host would wait
  CuEvent done_;
};

}  // namespace llmc
