// CpuProgram: the graphs of an artifact, every command resolved to a function and its buffers, and the memory that they
// compute in.
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

// A weight that a step streams: `parts` equal parts of `panels` each, whose tasks share the panels of all parts alike.
struct StreamedWeight {
  const char* data = nullptr;
  uint64_t panel_bytes = 0, panels = 0;
  uint32_t parts = 0, num_tasks = 0;
};

// What graphs compute in, one after the other: nothing in it outlives a step.
struct CpuArena {
  std::shared_ptr<const Pages> pages;
  uint64_t touched_bytes = 0, spread_bytes = 0;
};

class CpuProgram {
 public:
  // A command with every pointer resolved.
  struct Step {
    void* function;
    const CollectiveRecord* collective;  // in place of a function
    void* buffers[kMaxBuffers];
    uint32_t num_buffers, barrier, family, num_tasks;
    uint32_t tasks_each;  // of a thread
    bool streams;  // a weight
    bool looks_ahead;  // the weight that is read next is another one from the end of this step on
    StreamedWeight next;
  };
  struct StepRange {
    Step* begin = nullptr;
    Step* end = nullptr;
    uint32_t num_threads = 0;  // that its tasks are dealt to
  };

  CpuProgram() = default;
  // Where operands lie that are no graph's own.
  struct Memory {
    const WeightMemory& weights;
    const KvPool& pool;
    const AdapterPools& adapters;
  };
  // arena: of the program that this one is to replace, which it shares where that is large enough; nullptr: its own.
  static Status Make(std::shared_ptr<const Artifact> of, std::shared_ptr<const CpuCode> code, const Memory& memory,
                     uint32_t num_threads, const CpuArena* arena, CpuProgram* out);

  const Artifact& artifact() const { return *artifact_; }
  const std::shared_ptr<const Artifact>& shared_artifact() const { return artifact_; }
  int32_t* input(Input which) const { return inputs_[which]; }
  float* logits() const { return logits_; }
  // nullptr where graphs leave none.
  float* states() const { return states_; }
  // Commands of the longest graph.
  std::size_t longest() const { return longest_; }
  // Of the arena, see NodeSpread::Place.
  uint64_t spread_bytes() const { return arena_.spread_bytes; }
  const CpuArena& arena() const { return arena_; }

  // What one thread writes others read, and TouchArena has one thread touch all. Of an arena that is no other program's.
  void PlaceArena(NodeSpread* spread) { arena_.spread_bytes = spread->Place(*arena_.pages); }
  // Takes the arena of a graph from the system.
  void TouchArena(uint32_t graph);
  // The same, of the first bytes.
  void TouchArenaBytes(uint64_t bytes);
  // Takes from the system what a first step would wait for: code, and memory of inputs and logits. Of a program that
  // nobody runs yet.
  void TouchOwn();
  // Takes over how much of a shared arena was touched.
  void SetTouched(const CpuArena& arena) { arena_.touched_bytes = arena.touched_bytes; }
  // Between two replays: the weights lie elsewhere.
  void ResolveWeights(const WeightMemory& weights);
  // Between two replays: a graph whose tasks are dealt to so many threads. What was released is resolved again.
  const StepRange& Dealt(uint32_t graph, uint32_t num_threads) {
    if (graphs_[graph].begin == nullptr) Resolve(graph, num_threads);
    if (graphs_[graph].num_threads != num_threads) Deal(graph, num_threads);
    return graphs_[graph];
  }
  // Between two replays: gives back the memory of a graph's commands.
  void Release(uint32_t graph) {
    std::vector<Step>().swap(steps_[graph]);
    graphs_[graph] = {};
  }

 private:
  void* Address(const OperandRecord& operand) const;
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
  std::vector<std::vector<Step>> steps_;  // [graph]
  std::vector<StepRange> graphs_;
  std::size_t longest_ = 0;
};

}  // namespace llmc
