// CudaDevice: an artifact's graphs on one GPU, one step at a time in a stream.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "artifact/artifact.h"
#include "device/command_runner.h"
#include "device/cuda/cu_graphs.h"
#include "device/cuda/cu_machine.h"
#include "device/cuda/cu_memory.h"
#include "device/cuda/cu_programs.h"
#include "device/cuda/cu_sampling.h"
#include "device/device.h"

namespace llmc {

struct CudaDeviceOptions {
  bool sample = true;  // draw tokens on the device, where the artifact has the kernels
  CuGraphBudget graphs;
};

class CudaDevice final : public Device, public CommandRunner {
 public:
  static Status Create(const CuMachinePtr& machine, std::shared_ptr<const Artifact> artifact, uint32_t num_blocks,
                       const CudaDeviceOptions& options, std::unique_ptr<CudaDevice>* out);

  const ModelShape& model() const override { return artifact_->shape(); }
  uint32_t num_blocks() const override { return memory_->num_blocks(); }
  Status Enqueue(const StepBatch& batch, Fence* fence) override;
  Status Wait(Fence fence, const float** logits) override;
  bool samples() const override { return sampling_ != nullptr; }
  Status Sample(Fence fence, const std::vector<SampleTask>& tasks, std::vector<SampleOutcome>* outcomes) override;
  bool overlaps() const override { return true; }
  Status CopyBlock(uint32_t from, uint32_t to) override;
  void Visit(uint32_t graph) override;
  void GetStats(std::vector<DeviceStat>* out) const override;
  CommandRunner* command_runner() override { return this; }
  Status Begin(const StepBatch& batch) override;
  Status RunCommand(uint32_t command) override;
  Status ReadOperand(uint32_t command, uint32_t operand, uint64_t bytes, void* out) override;

 private:
  CudaDevice(CuMachinePtr machine, std::shared_ptr<const Artifact> artifact)
      : machine_(std::move(machine)), artifact_(std::move(artifact)) {}
  // The rest is in a scope of the machine.
  Status Load(uint32_t num_blocks, const CudaDeviceOptions& options);
  Status WriteInputs(uint64_t bytes);
  // Replays a graph for no row at all, to the end.
  Status RunEmpty(uint32_t graph);
  // Whether the batch is one of this device's; then its inputs are in the stream.
  Status TakeInputs(const StepBatch& batch);
  Status Submit(const StepBatch& batch);
  Status Finish(const char* doing) const;

  CuMachinePtr machine_;
  std::shared_ptr<const Artifact> artifact_;
  std::unique_ptr<CuPrograms> programs_;
  std::unique_ptr<CuMemory> memory_;
  std::unique_ptr<CuGraphs> graphs_;
  std::unique_ptr<CuSampling> sampling_;  // nullptr: the host draws
  CuPinned inputs_, logits_;  // of the step, as they lie in the device's buffers
  CuEvent done_;
  CuStream stream_;  // the first to go: what is above is released behind what is in it
  Fence last_fence_ = 0;
  uint32_t num_samples_ = 0;  // of the last step
  uint64_t num_replayed_ = 0, num_launched_ = 0;  // steps, by whether a graph was replayed
  uint32_t begun_ = 0;                            // graph of the step that is run command by command
};

}  // namespace llmc
