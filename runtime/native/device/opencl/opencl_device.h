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
#include "device/opencl/cl_sampling.h"
#include "device/registry.h"

namespace llmc {

struct OpenClDeviceOptions {
  bool sample = true;        // draw tokens on the device, if the artifact has the kernels
  bool overlap = true;       // prepare the next step while one runs
  uint64_t offload_bytes = 0;  // weights to leave in the host's memory
  std::string cache_folder;  // for binaries; empty: none
  GraphBudget graphs;
};

// Owns a command queue.
class ClQueue {
 public:
  ClQueue() = default;
  explicit ClQueue(std::shared_ptr<const ClMachine> machine) : machine_(std::move(machine)) {}
  ClQueue(const ClQueue&) = delete;
  ClQueue& operator=(const ClQueue&) = delete;
  // Waits for the queue's work: buffers are released only after it.
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
                       const LoadOptions& load, const OpenClDeviceOptions& options, std::unique_ptr<OpenClDevice>* out);
  ~OpenClDevice() override;

  const ModelShape& model() const override { return shape_; }
  Status NewGraphsOf(const std::shared_ptr<const Artifact>& artifact, std::unique_ptr<NewGraphs>* out) override;
  void Adopt(NewGraphs* graphs) override;
  uint32_t num_blocks() const override { return memory_->num_blocks(); }
  Status Enqueue(const StepBatch& batch, Fence* fence) override;
  Status Wait(Fence fence, const float** logits) override;
  bool samples() const override { return sampling_ != nullptr; }
  Status Sample(Fence fence, const std::vector<SampleTask>& tasks, std::vector<SampleOutcome>* outcomes) override;
  Overlap overlap() const override { return options_.overlap ? OverlapOf(sampling_.get()) : Overlap::kNone; }
  Status Chain(const std::vector<SampleTask>& tasks, const StepBatch& next, const std::vector<DrawnRow>& drawn,
               Fence* fence, bool* chained) override;
  Status SampleChained(Fence fence, const std::vector<SampleTask>& tasks, std::vector<SampleOutcome>* outcomes,
                       bool* lost) override {
    static_cast<void>(fence);
    return sampling_->End(tasks, outcomes, lost);
  }
  Status LoadAdapter(uint32_t slot, const std::vector<AdapterMatrix>& matrices) override {
    return memory_->LoadAdapter(queue_.get(), slot, matrices);
  }
  Status CopyBlock(uint32_t from, uint32_t to) override { return memory_->CopyBlock(queue_.get(), from, to); }
  Status ReadBlock(uint32_t block, unsigned char* out) override { return memory_->ReadBlock(queue_.get(), block, out); }
  Status WriteBlock(uint32_t block, const unsigned char* from) override {
    return memory_->WriteBlock(queue_.get(), block, from);
  }
  Status OpenSwapSpace(uint32_t num_places, uint64_t* ns) override;
  Status SaveBlock(uint32_t block, uint32_t place) override;
  Status LoadBlock(uint32_t place, uint32_t block) override;
  void Visit(uint32_t graph) override { static_cast<void>(RunEmpty(&run_, graph).ok()); }
  bool launches(uint32_t graph) const override { return !run_.graphs->is_recorded(graph); }
  void GetStats(std::vector<DeviceStat>* out) const override;
  CommandRunner* command_runner() override { return this; }
  Status Begin(const StepBatch& batch) override;
  Status RunCommand(uint32_t command) override;
  Status ReadOperand(uint32_t command, uint32_t operand, uint64_t bytes, void* out) override;

 private:
  OpenClDevice(std::shared_ptr<const ClMachine> machine, std::shared_ptr<const Artifact> artifact,
               std::shared_ptr<Collective> ranks)
      : machine_(std::move(machine)),
        artifact_(std::move(artifact)),
        ranks_(std::move(ranks)),
        shape_(artifact_->shape()),
        queue_(machine_) {}
  Status Load(uint32_t num_blocks, const OpenClDeviceOptions& options);
  // State that runs the graphs of an artifact. The other members stay when graphs are added.
  struct Runner {
    std::unique_ptr<ClPrograms> programs;
    ClWork work;
    std::unique_ptr<ClGraphs> graphs;
    // Copies of steps' device buffers. While inputs are filled, those of the step before may be on their way.
    std::vector<int32_t> inputs[2];
    uint32_t filled = 0;  // which inputs were filled last
    int32_t* words() { return inputs[filled].data(); }
    std::vector<float> logits;
  };
  // first_new: graphs before it have run already.
  Status MakeRunner(const Artifact& artifact, size_t first_new, Runner* out);
  Status WriteInputs(const Runner& runner, uint64_t bytes);
  // Replays a graph with zero rows, to the end.
  Status RunEmpty(Runner* runner, uint32_t graph);
  // Checks that the batch suits this device, and fills its inputs. *bytes: what to copy of them.
  Status FillInputs(const StepBatch& batch, uint64_t* bytes);
  Status TakeInputs(const StepBatch& batch);
  Status Replay(const StepBatch& batch);
  Status SubmitChain(const std::vector<SampleTask>& tasks, const StepBatch& next, const std::vector<DrawnRow>& drawn,
                     bool* chained);
  Status Submit(const StepBatch& batch);

  std::shared_ptr<const ClMachine> machine_;
  std::shared_ptr<const Artifact> artifact_;
  std::shared_ptr<Collective> ranks_;  // nullptr: it is alone
  ModelShape shape_;  // the engine keeps a reference
  OpenClDeviceOptions options_;
  ClQueue queue_;
  std::unique_ptr<ClMemory> memory_;
  Runner run_;
  std::unique_ptr<ClSampling> sampling_;  // nullptr: the host draws
  uint32_t num_samples_ = 0;              // of the last step
  uint64_t num_saved_ = 0, num_loaded_ = 0;  // blocks
  uint64_t num_replayed_ = 0, num_launched_ = 0;  // steps, by whether a recording was replayed
  AdapterTiler tiler_;
  Fence last_fence_ = 0;
  uint32_t begun_ = 0;  // graph of the step that is run command by command
};

}  // namespace llmc
