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
#include "device/registry.h"

namespace llmc {

struct CudaDeviceOptions {
  bool sample = true;  // draw tokens on the device, if the artifact has the kernels
  bool overlap = true;  // prepare the next step while one runs
  uint64_t offload_bytes = 0;  // weights to leave in the host's memory
  GraphBudget graphs;
};

class CudaDevice final : public Device, public CommandRunner {
 public:
  static Status Create(const CuMachinePtr& machine, std::shared_ptr<const Artifact> artifact, const LoadOptions& load,
                       const CudaDeviceOptions& options, std::unique_ptr<CudaDevice>* out);

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
                       bool* lost) override;
  Status LoadAdapter(uint32_t slot, const std::vector<AdapterMatrix>& matrices) override;
  Status CopyBlock(uint32_t from, uint32_t to) override;
  Status ReadBlock(uint32_t block, unsigned char* out) override;
  Status WriteBlock(uint32_t block, const unsigned char* from) override;
  Status OpenSwapSpace(uint32_t num_places, uint64_t* ns) override;
  Status SaveBlock(uint32_t block, uint32_t place) override;
  Status LoadBlock(uint32_t place, uint32_t block) override;
  void Visit(uint32_t graph) override;
  bool launches(uint32_t graph) const override { return !run_.graphs->has_instance(graph); }
  void GetStats(std::vector<DeviceStat>* out) const override;
  CommandRunner* command_runner() override { return this; }
  Status Begin(const StepBatch& batch) override;
  Status RunCommand(uint32_t command) override;
  Status ReadOperand(uint32_t command, uint32_t operand, uint64_t bytes, void* out) override;

 private:
  CudaDevice(CuMachinePtr machine, std::shared_ptr<const Artifact> artifact, std::shared_ptr<Collective> ranks)
      : machine_(std::move(machine)),
        artifact_(std::move(artifact)),
        ranks_(std::move(ranks)),
        shape_(artifact_->shape()) {}
  // Call the functions below in a scope of the machine.
  // Allocates block_ at the first call.
  Status TakeBlock();
  Status Load(uint32_t num_blocks, const CudaDeviceOptions& options);
  CuPinned block_;  // a KV block between host and GPU: copies from other memory of the host would wait
  // State that runs the graphs of an artifact. The other members stay when graphs are added.
  struct Runner {
    std::shared_ptr<const CuPrograms> programs;
    CuWork work;
    // Copies of steps' device buffers. While inputs are filled, those of the step before may be on their way.
    CuPinned inputs[2], logits;
    uint32_t filled = 0;  // which inputs were filled last
    int32_t* words() const { return static_cast<int32_t*>(inputs[filled].get()); }
    std::unique_ptr<CuGraphs> graphs;
  };
  // first_new: graphs before it have run already. Work that it enqueues has ended when it returns.
  Status MakeRunner(const Artifact& artifact, size_t first_new, Runner* out);
  Status WriteInputs(const Runner& runner, uint64_t bytes);
  // Replays a graph with zero rows, to the end.
  Status RunEmpty(const Runner& runner, uint32_t graph);
  // Checks that the batch suits this device, and fills its inputs. *bytes: what to copy of them.
  Status FillInputs(const StepBatch& batch, uint64_t* bytes);
  Status TakeInputs(const StepBatch& batch);
  Status Replay(const StepBatch& batch);
  Status SubmitChain(const std::vector<SampleTask>& tasks, const StepBatch& next, const std::vector<DrawnRow>& drawn,
                     bool* chained);
  Status Submit(const StepBatch& batch);
  Status Finish(const char* doing) const;

  CuMachinePtr machine_;
  std::shared_ptr<const Artifact> artifact_;
  std::shared_ptr<Collective> ranks_;  // nullptr: it is alone
  ModelShape shape_;  // the engine keeps a reference
  CudaDeviceOptions options_;
  std::unique_ptr<CuMemory> memory_;
  Runner run_;
  std::unique_ptr<CuSampling> sampling_;  // nullptr: the host draws
  AdapterTiler tiler_;
  CuEvent done_;
  CuStream stream_;  // destroyed first: members above are released after its work has ended
  Fence last_fence_ = 0;
  uint32_t num_samples_ = 0;  // of the last step
  uint64_t num_replayed_ = 0, num_launched_ = 0;  // steps, by whether a graph was replayed
  uint64_t num_saved_ = 0, num_loaded_ = 0;       // blocks
  uint32_t begun_ = 0;                            // graph of the step that is run command by command
};

}  // namespace llmc
