// CpuProgram: the graphs of an artifact, with every command of a stage resolved to a function and its buffers, and their
// working memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "artifact/artifact.h"
#include "core/mapped_file.h"
#include "device/cpu/adapter_pools.h"
#include "device/cpu/cpu_code.h"
#include "device/cpu/kv_pool.h"
#include "device/cpu/memory_nodes.h"
#include "device/cpu/weight_memory.h"

namespace llmc {

// A weight streamed by a step: `parts` equal parts of `panels` panels each; the tasks divide the panels of all parts in
// the same way.
struct StreamedWeight {
  const char* data = nullptr;
  uint64_t panel_bytes = 0, panels = 0;
  uint32_t parts = 0, num_tasks = 0;
};

// Working memory of graphs, used by one graph at a time: its contents do not outlive a step.
struct CpuArena {
  std::shared_ptr<const Pages> pages;
  uint64_t touched_bytes = 0, spread_bytes = 0;
};

class CpuProgram {
 public:
  // A command with all pointers resolved.
  struct Step {
    uint32_t command;  // its index in the graph
    void* function;
    const CollectiveRecord* collective;  // set instead of a function
    uint64_t place;  // of what is passed on, see StageWalk::place
    void* buffers[kMaxBuffers];
    uint32_t num_buffers, barrier, family, num_tasks;
    uint32_t tasks_each;  // tasks per thread
    bool streams;  // reads a weight
    bool looks_ahead;  // the weight read next changes after this step
    StreamedWeight next;
  };
  struct StepRange {
    Step* begin = nullptr;
    Step* results = nullptr;  // from here on, results of the last stage are taken; the end where this one makes them
    Step* end = nullptr;
    uint32_t num_threads = 0;  // threads that its tasks are distributed to
  };

  CpuProgram() = default;
  // Memory of operands that belong to no single graph. weights: nullptr if they may move meanwhile; then call
  // ResolveWeights before a replay.
  struct Memory {
    const WeightMemory* weights;
    const KvPool& pool;
    const AdapterPools& adapters;
    uint32_t stage = 0;  // whose commands run
  };
  // arena: that of the program being replaced, shared if large enough; nullptr: make a new one.
  static Status Make(std::shared_ptr<const Artifact> of, std::shared_ptr<const CpuCode> code, const Memory& memory,
                     uint32_t num_threads, const CpuArena* arena, CpuProgram* out);

  const Artifact& artifact() const { return *artifact_; }
  const std::shared_ptr<const Artifact>& shared_artifact() const { return artifact_; }
  const std::shared_ptr<const CpuCode>& shared_code() const { return code_; }
  int32_t* input(Input which) const { return inputs_[which]; }
  float* logits() const { return logits_; }
  // nullptr if graphs output none.
  float* states() const { return states_; }
  // Commands of the longest graph.
  std::size_t longest() const { return longest_; }
  // Bytes of the arena that are spread, see NodeSpread::Place.
  uint64_t spread_bytes() const { return arena_.spread_bytes; }
  const CpuArena& arena() const { return arena_; }

  // Threads read each other's results, and TouchArena touches all pages from one thread. Only for an arena that no
  // other program shares.
  void PlaceArena(NodeSpread* spread) { arena_.spread_bytes = spread->Place(*arena_.pages); }
  // Allocates the pages of a graph's arena.
  void TouchArena(uint32_t graph);
  // As TouchArena, for the first bytes.
  void TouchArenaBytes(uint64_t bytes);
  // Allocates what a first step would wait for: pages of code, inputs and logits. Only before the program runs.
  void TouchOwn();
  // Copies from a shared arena how much of it was touched.
  void SetTouched(const CpuArena& arena) { arena_.touched_bytes = arena.touched_bytes; }
  // Call between two replays, after the weights have moved, or to set them.
  void ResolveWeights(const WeightMemory& weights);
  // Returns a graph with its tasks distributed to num_threads threads. Resolves a released graph again. Call between
  // two replays.
  const StepRange& Dealt(uint32_t graph, uint32_t num_threads) {
    if (graphs_[graph].begin == nullptr) Resolve(graph, num_threads);
    if (graphs_[graph].num_threads != num_threads) Deal(graph, num_threads);
    return graphs_[graph];
  }
  // Frees the memory of a graph's commands. Call between two replays.
  void Release(uint32_t graph) {
    std::vector<Step>().swap(steps_[graph]);
    graphs_[graph] = {};
  }

 private:
  void* Address(const OperandRecord& operand) const;
  bool TakesResults(const Step& step) const;
  void Resolve(uint32_t graph, uint32_t num_threads);
  void Deal(uint32_t graph, uint32_t num_threads);
  StreamedWeight Streamed(const CommandRecord& command, const Step& step) const;

  std::shared_ptr<const Artifact> artifact_;
  std::shared_ptr<const CpuCode> code_;
  CpuArena arena_;
  Pages io_;
  int32_t* inputs_[kNumInputs] = {};
  float *logits_ = nullptr, *states_ = nullptr;
  const WeightMemory* weights_ = nullptr;
  const KvPool* pool_ = nullptr;
  const AdapterPools* adapters_ = nullptr;
  uint32_t stage_ = 0;
  std::vector<std::vector<Step>> steps_;  // [graph]
  std::vector<StepRange> graphs_;
  std::size_t longest_ = 0;
};

}  // namespace llmc
