// CuGraphs: the graphs of an artifact, each as one CUDA graph or, beyond the budget, as launches of its kernels.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "artifact/artifact.h"
#include "core/status.h"
#include "device/cuda/cu_memory.h"
#include "device/cuda/cu_programs.h"
#include "device/gpu/graph_launches.h"

namespace llmc {

struct CuDestroyGraph {
  void operator()(const CuMachine& cuda, CuGraph graph) const { cuda->GraphDestroy(graph); }
};
struct CuDestroyExec {
  void operator()(const CuMachine& cuda, CuGraphExec exec) const { cuda->GraphExecDestroy(exec); }
};

// Device memory that instances of graphs may take.
struct CuGraphBudget {
  bool eager = false;  // no instances
  uint64_t bytes = UINT64_MAX;
};

class CuGraphs {
 public:
  // Call in a scope of the machine. Programs, memory and work must outlive the graphs. Graphs beyond the budget run as
  // launches. Decode graphs come first, since launches are most of their steps.
  static Status Make(CuMachinePtr machine, const Artifact& artifact, const CuPrograms& programs, const CuMemory& memory,
                     const CuWork& work, CuStreamHandle stream, const CuGraphBudget& budget,
                     std::unique_ptr<CuGraphs>* out);

  const StepLayout& inputs(uint32_t graph) const { return graphs_[graph].inputs; }
  uint32_t num_instances() const { return num_instances_; }
  uint64_t instance_bytes() const { return instance_bytes_; }
  CuPointer place(uint32_t graph, uint32_t command, uint32_t operand) const {
    return graphs_[graph].launches[command].places[operand];
  }
  bool has_instance(uint32_t graph) const { return graphs_[graph].exec.get() != nullptr; }
  // Enqueues a graph.
  Status Enqueue(uint32_t graph) const;
  // Enqueues one command of a graph.
  Status EnqueueCommand(uint32_t graph, uint32_t command) const { return Launch(graphs_[graph].launches[command]); }

 private:
  using Launches = GraphLaunches<CuFunction, CuPointer>;
  using OneLaunch = Launches::Launch;
  struct Graph : Launches {
    CuOwned<CuGraphExec, CuDestroyExec> exec;
  };
  CuGraphs(CuMachinePtr machine, CuPointer scalars, CuStreamHandle stream)
      : machine_(std::move(machine)), scalars_(scalars), stream_(stream) {}
  Status Launch(const OneLaunch& launch) const;
  // Makes an instance. *out stays empty if the budget has no room for it.
  Status Instantiate(const Graph& graph, uint64_t free_before, uint64_t budget,
                     CuOwned<CuGraphExec, CuDestroyExec>* out);
  Status Record(const Graph& graph, CuGraph into) const;

  CuMachinePtr machine_;
  CuPointer scalars_;
  CuStreamHandle stream_;
  uint32_t num_instances_ = 0;
  uint64_t instance_bytes_ = 0;
  std::vector<Graph> graphs_;
};

}  // namespace llmc
