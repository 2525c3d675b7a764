// CpuDevice: an artifact's graphs on a thread team of this machine. A program holds the commands, a KV pool and
// weights; a replay runs it.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "artifact/artifact.h"
#include "collective/collective.h"
#include "device/command_runner.h"
#include "device/cpu/adapter_pools.h"
#include "device/cpu/cpu_program.h"
#include "device/cpu/cpu_replay.h"
#include "device/cpu/kv_pool.h"
#include "device/cpu/memory_nodes.h"
#include "device/cpu/team.h"
#include "device/cpu/weight_memory.h"
#include "device/device.h"

namespace llmc {

struct CpuDeviceOptions {
  uint32_t num_threads = 0;  // see TeamOptions, also for pin and idle_spin_us
  PoolCounts pool;
  bool pin = true;
  uint32_t idle_spin_us = 1000;
  bool adapt = false;  // see TeamOptions; off here because a measurement needs all threads
  bool eager = false;  // start the team at every command, instead of once for all commands of a graph
  TeamClock* clock = nullptr;
  WeightOptions weights;
  NodeSystem nodes;
  std::shared_ptr<Collective> collective;  // for an artifact with several ranks
  uint32_t steps_in_flight = 1;  // of an artifact with stages, the same on all ranks; see Device::steps_in_flight
  std::shared_ptr<Team> team;  // team of a device that never runs at the same time; null: makes its own
};

// Threads that work now, and how often load from other programs has reduced them.
struct TeamUse {
  uint32_t size = 0;
  uint64_t cuts = 0;
};

class CpuNewGraphs;

class CpuDevice final : public Device, public CommandRunner {
 public:
  static Status Create(std::shared_ptr<const Artifact> artifact, const CpuDeviceOptions& options,
                       std::unique_ptr<CpuDevice>* out);

  const ModelShape& model() const override { return shape_; }
  Status NewGraphsOf(const std::shared_ptr<const Artifact>& artifact, std::unique_ptr<NewGraphs>* out) override;
  void Adopt(NewGraphs* graphs) override;
  Status LoadAdapter(uint32_t slot, const std::vector<AdapterMatrix>& matrices) override {
    adapters_.Load(slot, matrices);
    return Status::Ok();
  }
  uint32_t num_blocks() const override { return pool_.counts().blocks; }
  uint32_t num_states() const override { return pool_.counts().states; }
  uint32_t num_host_threads() const override { return team_->num_threads(); }
  // Copies a part of the weights to huge pages, if that pays. An error: weights cannot be read.
  Status BeforeStep() override;
  void Recall() override { team_->Recall(); }
  const std::shared_ptr<Team>& team() const { return team_; }
  void Reserve(const StepBatch& batch) override;
  void Visit(uint32_t graph) override { replay_.Visit(graph); }
  bool launches(uint32_t) const override { return eager_; }
  void Release(uint32_t graph) override { replay_.Release(graph); }
  // The step is done when this returns, except for results that another stage makes.
  Status Enqueue(const StepBatch& batch, Fence* fence) override;
  Status Wait(Fence fence, const float** logits) override;
  Overlap overlap() const override { return steps_in_flight_ > 1 ? Overlap::kDisjoint : Overlap::kNone; }
  uint32_t steps_in_flight() const override { return steps_in_flight_; }
  // Where one job runs a whole graph, and it is not that of a stage.
  bool cuts_steps() const override { return !eager_ && one_stage_ && replay_.program().states() == nullptr; }
  Status CutSteps(uint32_t least_rows) override;
  float* TakenStates() override { return replay_.program().states(); }
  Status ReadStates(uint32_t, const float** states) override {
    *states = replay_.program().states();
    return Status::Ok();
  }
  ReplayTime last_replay() const override { return replay_.times().last(); }
  void GetStats(std::vector<DeviceStat>* out) const override;
  ReplayProfile* profile() override { return &replay_.times(); }
  CommandRunner* command_runner() override { return this; }
  Status Begin(const StepBatch& batch) override;
  Status RunCommand(uint32_t command) override;
  Status ReadOperand(uint32_t command, uint32_t operand, uint64_t bytes, void* out) override;
  void ForEach(uint32_t count, uint32_t num_workers, Job job, void* context) override;
  Status CopyBlock(uint32_t from, uint32_t to) override { return Copy(PoolKind::kBlocks, from, to); }
  Status CopyState(uint32_t from, uint32_t to) override { return Copy(PoolKind::kStates, from, to); }
  Status ReadBlock(uint32_t block, unsigned char* out) override { return pool_.Read(PoolKind::kBlocks, block, out); }
  Status ReadState(uint32_t slot, unsigned char* out) override { return pool_.Read(PoolKind::kStates, slot, out); }
  Status WriteBlock(uint32_t block, const unsigned char* from) override {
    return pool_.Write(PoolKind::kBlocks, block, from);
  }
  Status WriteState(uint32_t slot, const unsigned char* from) override {
    return pool_.Write(PoolKind::kStates, slot, from);
  }

  // Like Run, for a batch owned by the caller.
  Status Replay(const BatchView& batch, const float** logits);
  TeamUse team_use() const;
  // Bytes of weights, and how many of them were copied to huge pages.
  uint64_t weight_bytes() const { return weights_.bytes(); }
  uint64_t copied_weight_bytes() const { return weights_.moved_bytes(); }
  MemorySpread memory_spread() const;

 private:
  CpuDevice(ModelShape shape, KvPool pool, AdapterPools adapters, std::shared_ptr<Team> team,
            const CpuDeviceOptions& options);
  Status PlaceMemory(std::shared_ptr<const Artifact> artifact, const CpuDeviceOptions& options);
  Status LoadProgram(std::shared_ptr<const Artifact> artifact, std::shared_ptr<const CpuCode> code);
  Status Copy(PoolKind kind, uint32_t from, uint32_t to);
  CpuProgram::Memory memory() const { return {&weights_, pool_, adapters_, stage_}; }

  ModelShape shape_;
  KvPool pool_;
  AdapterPools adapters_;
  std::shared_ptr<Team> team_;
  const bool eager_;
  NodeSpread spread_;
  uint64_t spread_pool_bytes_ = 0;
  WeightMemory weights_;  // of the first artifact, for the device's lifetime
  uint32_t stage_;  // of this rank
  bool one_stage_;  // of several ranks
  uint32_t steps_in_flight_;
  CpuReplay replay_;
  uint32_t begun_ = 0;  // graph of the step that runs command by command
};

}  // namespace llmc
