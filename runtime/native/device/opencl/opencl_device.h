// OpenClDevice: an artifact's graphs on one OpenCL device, one step at a time in an in-order queue.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "artifact/artifact.h"
#include "device/command_runner.h"
#include "device/device.h"
#include "device/opencl/cl_graphs.h"
#include "device/opencl/cl_machine.h"
#include "device/opencl/cl_memory.h"
#include "device/opencl/cl_programs.h"

namespace llmc {

struct OpenClDeviceOptions {
  bool eager = false;        // launch kernels one by one where graphs could be recorded
  std::string cache_folder;  // of binaries; empty: none
};

// Owns a command queue.
class ClQueue {
 public:
  ClQueue() = default;
  explicit ClQueue(std::shared_ptr<const ClMachine> machine) : machine_(std::move(machine)) {}
  ClQueue(const ClQueue&) = delete;
  ClQueue& operator=(const ClQueue&) = delete;
  // Waits for what is in it: buffers are released behind it.
  ~ClQueue();

  Status Open();
  cl_command_queue get() const { return queue_; }

 private:
  std::shared_ptr<const ClMachine> machine_;
  cl_command_queue queue_ = nullptr;
};

class OpenClDevice final : public Device, public CommandRunner {
 public:
  static Status Create(std::shared_ptr<const ClMachine> machine, std::shared_ptr<const Artifact> artifact,
                       uint32_t num_blocks, const OpenClDeviceOptions& options, std::unique_ptr<OpenClDevice>* out);
  ~OpenClDevice() override;

  const ModelShape& model() const override { return artifact_->shape(); }
  uint32_t num_blocks() const override { return memory_->num_blocks(); }
  Status Enqueue(const StepBatch& batch, Fence* fence) override;
  Status Wait(Fence fence, const float** logits) override;
  bool overlaps() const override { return true; }
  Status CopyBlock(uint32_t from, uint32_t to) override { return memory_->CopyBlock(queue_.get(), from, to); }
  void Visit(uint32_t graph) override { static_cast<void>(RunEmpty(graph).ok()); }
  void GetStats(std::vector<DeviceStat>* out) const override;
  CommandRunner* command_runner() override { return this; }
  Status Begin(const StepBatch& batch) override;
  Status RunCommand(uint32_t command) override;
  Status ReadOperand(uint32_t command, uint32_t operand, uint64_t bytes, void* out) override;

 private:
  OpenClDevice(std::shared_ptr<const ClMachine> machine, std::shared_ptr<const Artifact> artifact)
      : machine_(std::move(machine)), artifact_(std::move(artifact)), queue_(machine_) {}
  Status Load(uint32_t num_blocks, const OpenClDeviceOptions& options);
  Status WriteInputs(uint64_t bytes);
  // Replays a graph for no row at all, to the end.
  Status RunEmpty(uint32_t graph);
  // Whether the batch is one of this device's; then its inputs are in the queue.
  Status TakeInputs(const StepBatch& batch);
  Status Submit(const StepBatch& batch);

  std::shared_ptr<const ClMachine> machine_;
  std::shared_ptr<const Artifact> artifact_;
  ClQueue queue_;
  std::unique_ptr<ClPrograms> programs_;
  std::unique_ptr<ClMemory> memory_;
  std::unique_ptr<ClGraphs> graphs_;
  std::vector<int32_t> inputs_;  // of the step, as they lie in the device's buffer
  std::vector<float> logits_;
  cl_event read_ = nullptr;  // of the logits of the last step
  Fence last_fence_ = 0;
  uint32_t begun_ = 0;  // graph of the step that is run command by command
};

}  // namespace llmc
