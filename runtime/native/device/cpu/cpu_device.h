// CpuDevice: replays an artifact's graphs on a thread team over its own KV pool and arena.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "artifact/artifact.h"
#include "core/mapped_file.h"
#include "device/cpu/cpu_code.h"
#include "device/cpu/memory_nodes.h"
#include "device/cpu/read_ahead.h"
#include "device/cpu/team.h"
#include "device/cpu/weight_memory.h"
#include "device/device.h"
#include "device/replay_profile.h"

namespace llmc {

struct CpuDeviceOptions {
  uint32_t num_threads = 0;  // as in TeamOptions, and so are pin and idle_spin_us
  uint32_t num_blocks = 0;   // the dummy block included
  bool pin = true;
  uint32_t idle_spin_us = 1000;
  bool adapt = false;  // too: a measurement wants all threads
  TeamClock* clock = nullptr;
  WeightOptions weights;
  NodeSystem nodes;
};

// How many threads work now, and how often others' work has made them fewer.
struct TeamUse {
  uint32_t size = 0;
  uint64_t cuts = 0;
};

class CpuDevice final : public Device, public ReplayProfile {
 public:
  static Status Create(std::shared_ptr<const Artifact> artifact, const CpuDeviceOptions& options,
                       std::unique_ptr<CpuDevice>* out);

  const ModelShape& model() const override { return shape_; }
  Status AddGraphs(std::shared_ptr<const Artifact> artifact) override;
  uint32_t num_blocks() const override { return num_blocks_; }
  uint32_t num_threads() const override { return team_->num_threads(); }
  uint32_t num_host_threads() const override { return num_threads(); }
  // Moves a part of the weights to where they are read fastest, if that pays. An error: weights cannot be read.
  Status BeforeStep() override;
  void Recall() override { team_->Recall(); }
  void Reserve(const StepBatch& batch) override;
  void Visit(uint32_t graph) override;
  // The step is done when this returns.
  Status Enqueue(const StepBatch& batch, Fence* fence) override;
  Status Wait(Fence fence, const float** logits) override;
  ReplayTime last_replay() const override { return last_; }
  void GetStats(std::vector<DeviceStat>* out) const override;
  ReplayProfile* profile() override { return this; }
  void ForEach(uint32_t count, uint32_t num_workers, Job job, void* context) override;
  Status CopyBlock(uint32_t from, uint32_t to) override;

  // As Run; on failure nothing ran.
  Status Replay(const BatchView& batch, const float** logits);
  TeamUse team_use() const;
  // Bytes of weights, and of those the bytes that were copied to where they are read fastest.
  uint64_t weight_bytes() const { return weights_.artifact().weight_file().size(); }
  uint64_t copied_weight_bytes() const { return weights_.moved_bytes(); }
  MemorySpread memory_spread() const;

  const ReplayStats& stats() const override { return stats_; }
  void SetProfiling(bool on) override;
  uint32_t num_profiled() const override { return num_profiled_; }
  CommandTime Profiled(uint32_t thread, uint32_t index) const override;

 private:
  // A weight that a step streams: `parts` equal parts of `panels` each, whose tasks share the panels of all parts alike.
  struct StreamedWeight {
    const char* data = nullptr;
    uint64_t panel_bytes = 0, panels = 0;
    uint32_t parts = 0, num_tasks = 0;
  };

  // A command with every pointer resolved.
  struct Step {
    void* function;
    void* buffers[kMaxBuffers];
    uint32_t num_buffers, barrier, family, num_tasks;
    uint32_t tasks_each;  // of a thread
    bool streams;         // a weight
    bool looks_ahead;     // the weight that is read next is another one from the end of this step on
    StreamedWeight next;
  };
  struct StepRange {
    Step* begin;
    Step* end;
    uint32_t num_threads;  // that its tasks are dealt to
  };

  // The graphs of an artifact, ready to be replayed, and the memory that they compute in. AddGraphs replaces it.
  struct Program {
    std::shared_ptr<const Artifact> artifact;
    std::shared_ptr<const CpuCode> code;
    Pages arena, io;
    uint64_t touched_arena_bytes = 0, spread_bytes = 0;
    int32_t* inputs[kNumInputs] = {};
    float* logits = nullptr;
    std::vector<Step> steps;
    std::vector<StepRange> graphs;
    // [turn][thread][command]: how many of its tasks were claimed, or more. Replays take turns: one resets the other's.
    std::vector<std::atomic<uint32_t>> claimed;
    std::size_t claims_of_thread = 0, longest = 0;  // longest: commands of a graph
  };

  CpuDevice() = default;
  Status AllocatePool(const Artifact& artifact);
  Status MakeProgram(std::shared_ptr<const Artifact> of, std::shared_ptr<const CpuCode> code, Program* out) const;
  void PlaceArena(Program* program);
  void Resolve(Program* program) const;
  void Deal(Program* program, uint32_t graph, uint32_t num_threads) const;
  void ResolveWeights();
  void* OperandAddress(const Program& program, const OperandRecord& operand) const;
  void CopyInputs(const BatchView& batch);
  static StreamedWeight Streamed(const Artifact& artifact, const CommandRecord& command, const Step& step);
  void LookAhead(const Step& step, uint32_t thread, uint32_t num_threads, ReadAhead* ahead) const;
  std::atomic<uint32_t>* Claims(uint32_t turn, uint32_t thread);
  void Compute(const Step& step, std::size_t index, uint32_t thread, uint32_t num_threads, ReadAhead* ahead);
  void ResetClaims(uint32_t turn, uint32_t thread);
  void RunTeam(uint32_t graph);
  void WalkThread(uint32_t thread, uint32_t num_threads);
  void WalkTimed(uint32_t thread, uint32_t num_threads);
  void Account(uint64_t start, uint64_t end, uint64_t ns);

  WeightMemory weights_;  // of the first artifact, for good
  ModelShape shape_;
  std::unique_ptr<Team> team_;
  NodeSpread spread_;
  uint64_t most_ahead_bytes_ = 0;
  uint32_t num_blocks_ = 0;
  Pages kv_pool_;
  uint64_t spread_pool_bytes_ = 0;
  uint64_t touched_blocks_ = 0;
  uint64_t key_pool_bytes_ = 0, layer_pool_bytes_ = 0;  // K of one layer; K and V of one layer
  Program program_;

  // The step being replayed.
  int64_t scalars_[8] = {};
  uint32_t turn_ = 0;
  uint32_t last_size_ = 0;  // threads of the last replay
  StepRange current_{};
  struct {  // thread 0's, in ticks
    std::array<uint64_t, kNumFamilies> family;
    uint64_t barrier, done;
  } ticks_{};
  ReplayStats stats_;
  ReplayTime last_;

  // Profiling: [thread][command], in ticks; empty while it is off.
  std::vector<CommandTime> profile_;
  std::size_t profile_stride_ = 0;
  uint32_t num_profiled_ = 0;
  uint64_t profile_start_ = 0;
  double ns_per_tick_ = 0;
};

}  // namespace llmc
