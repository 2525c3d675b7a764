// OpenClDevice: an artifact's graphs on one OpenCL device, one step at a time in an in-order queue.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "artifact/artifact.h"
#include "device/gpu/gpu_device.h"
#include "device/opencl/cl_graphs.h"
#include "device/opencl/cl_machine.h"
#include "device/opencl/cl_memory.h"
#include "device/opencl/cl_programs.h"
#include "device/opencl/cl_sampling.h"

namespace llmc {

struct OpenClDeviceOptions : GpuOptions {
  std::string cache_folder;  // for binaries; empty: none
};

struct ClReleaseQueue {
  void operator()(const ClMachine& cl, cl_command_queue queue) const { cl->ReleaseCommandQueue(queue); }
};

// Functions of OpenCL need no scope.
struct ClScope {
  explicit ClScope(const ClMachine&) {}
  Status status() const { return Status::Ok(); }
};

struct OpenClParts {
  using Machine = ClMachine;
  using Scope = ClScope;
  using Queue = Owned<ClMachine, cl_command_queue, ClReleaseQueue>;
  using Programs = ClPrograms;
  using Memory = ClMemory;
  using Work = ClWork;
  using Graphs = ClGraphs;
  using Sampling = ClSampling;
  using Place = ClPlace;
  using Inputs = std::vector<int32_t>;
  using Logits = std::vector<float>;
};

class OpenClDevice final : public GpuDevice<OpenClParts> {
 public:
  static Status Create(std::shared_ptr<const ClMachine> machine, std::shared_ptr<const Artifact> artifact,
                       const LoadOptions& load, const OpenClDeviceOptions& options, std::unique_ptr<OpenClDevice>* out);
  ~OpenClDevice() override { Drain(); }

  Status LoadAdapter(uint32_t slot, const std::vector<AdapterMatrix>& matrices) override {
    return InScope([&] { return memory_->LoadAdapter(queue_.get(), slot, matrices); });
  }

 private:
  OpenClDevice(std::shared_ptr<const ClMachine> machine, std::shared_ptr<const Artifact> artifact,
               std::shared_ptr<Collective> ranks, const OpenClDeviceOptions& options)
      : GpuDevice(std::move(machine), std::move(artifact), std::move(ranks), options),
        cache_folder_(options.cache_folder) {}
  Status LoadPrograms(const Artifact& artifact, const ClPrograms* known,
                      std::shared_ptr<const ClPrograms>* out) const override;
  void KeepPrograms(const Runner& runner) const override { runner.programs->Store(); }
  Status OpenQueue(OpenClParts::Queue* out) const override;
  Status ReadEntry(PoolKind kind, uint32_t entry, unsigned char* out) override {
    return memory_->Read(queue_.get(), kind, entry, out);
  }
  Status WriteEntry(PoolKind kind, uint32_t entry, const unsigned char* from) override {
    return memory_->Write(queue_.get(), kind, entry, from);
  }
  Status MakeSampling(std::unique_ptr<ClSampling>* out) const override;
  Status MakeGraphs(const Artifact& artifact, Runner* runner) const override;
  int32_t* WordsOf(Runner* runner) const override { return runner->inputs[runner->filled].data(); }
  Status WriteInputs(const Runner& runner, uint64_t bytes) const override;
  float* HiddenOf(Runner& runner) const override { return runner.hidden.data(); }
  Status WriteHidden(const Runner& runner, uint64_t bytes) const override;
  Status Start(uint32_t num_samples) override;
  Status ReadLogits(uint32_t num_samples, const float** logits) override;
  Status ReadMemory(const ClPlace& from, uint64_t bytes, void* out) const override;
  Status Finish(const char* doing) const override;
  Status AwaitQueued(const char* doing) const override { return machine_->AwaitQueued(queue_.get(), doing); }
  bool records() const override { return !options().graphs.eager && machine_->command_buffers() != nullptr; }
  void AddProgramStats(std::vector<DeviceStat>* out) const override;

  const std::string cache_folder_;
};

}  // namespace llmc
