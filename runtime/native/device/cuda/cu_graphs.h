// CuGraphs: the graphs of an artifact, each as one CUDA graph or, beyond the budget, as launches of its kernels.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "artifact/artifact.h"
#include "collective/collective.h"
#include "core/status.h"
#include "device/cuda/cu_memory.h"
#include "device/cuda/cu_nccl.h"
#include "device/cuda/cu_programs.h"
#include "device/cuda/cu_weight_stream.h"
#include "device/gpu/graph_budget.h"
#include "device/gpu/graph_launches.h"
#include "device/gpu/host_collective.h"

namespace llmc {

struct CuDestroyGraph {
  void operator()(const CuMachine& cuda, CuGraph graph) const { cuda->GraphDestroy(graph); }
};
struct CuDestroyExec {
  void operator()(const CuMachine& cuda, CuGraphExec exec) const { cuda->GraphExecDestroy(exec); }
};

class CuGraphs {
 public:
  // Call in a scope of the machine. Programs, memory and work must outlive the graphs. Graphs beyond the budget run as
  // launches. early: kernels begin while those before them end, which all of them await. ranks: what this device is one
  // of; nullptr: it is alone. nccl: of these ranks; nullptr: the host exchanges all that they have.
  static Status Make(CuMachinePtr machine, const Artifact& artifact, const CuPrograms& programs, const CuMemory& memory,
                     const CuWork& work, CuStreamHandle stream, const GraphBudget& budget, bool early,
                     std::shared_ptr<Collective> ranks, std::shared_ptr<const CuNccl> nccl,
                     std::unique_ptr<CuGraphs>* out);

  const StepLayout& inputs(uint32_t graph) const { return graphs_[graph].inputs; }
  uint32_t num_recorded() const { return num_instances_; }
  uint64_t recorded_bytes() const { return instance_bytes_; }
  bool is_recorded(uint32_t graph) const { return !graphs_[graph].execs.empty(); }
  // Forms of a graph: an instance may be enqueued again while it runs.
  size_t num_forms(uint32_t) const { return 1; }
  CuPointer place(uint32_t graph, uint32_t command, uint32_t operand) const {
    return graphs_[graph].launches[command].places[operand];
  }
  // Enqueues a graph. Of several ranks it returns behind the last result that their hosts exchange.
  Status Enqueue(uint32_t graph, const StepRows& rows) const;
  // Enqueues one command of a graph.
  Status EnqueueCommand(uint32_t graph, uint32_t command) const;
  // Bytes of weights that a step copies from the host.
  uint64_t streamed_bytes(uint32_t graph) const { return graphs_[graph].streamed_bytes; }
  bool early() const { return early_; }

 private:
  using Launches = GraphLaunches<CuFunction, CuPointer>;
  using OneLaunch = Launches::Launch;
  // Segments [begin, end), of which the GPUs join all but the last. loads: of the weights that it streams.
  struct Piece {
    size_t begin, end;
    std::vector<RingLoad> loads{};
  };
  // An instance of each piece; one without launches has none.
  using Execs = std::vector<CuOwned<CuGraphExec, CuDestroyExec>>;
  struct Graph : Launches {
    uint64_t tokens = 0, samples = 0;  // rows of a step that fills it
    uint64_t streamed_bytes = 0;
    std::vector<Piece> pieces;
    Execs execs;  // empty: its kernels are launched
  };
  CuGraphs(CuMachinePtr machine, const CuMemory& memory, CuPointer scalars, CuStreamHandle stream, bool early,
           std::shared_ptr<Collective> ranks, std::shared_ptr<const CuNccl> nccl)
      : machine_(std::move(machine)),
        memory_(memory),
        scalars_(scalars),
        stream_(stream),
        early_(early),
        ranks_(std::move(ranks)),
        nccl_(std::move(nccl)) {}
  // Whether the GPUs join what is behind a segment.
  bool JoinsOnGpu(const Launches::Segment& segment) const;
  void Divide(const GraphRecord& record, Graph* graph) const;
  // Plans the loads of a graph's pieces. Operands that are streamed get their places in the ring.
  void PlanLoads(const Artifact& artifact, const GraphRecord& record, uint32_t stage, Graph* graph) const;
  Status MakeWeightStream();
  Status TakeGathered(const Artifact& artifact);
  // behind_kernel: the stream's work before it is a kernel of the same graph.
  Status Launch(const OneLaunch& launch, bool behind_kernel, CuStreamHandle stream) const;
  // Makes instances of a graph's pieces, as RecordGraph says.
  Status Instantiate(Graph* graph, uint64_t room, uint64_t* taken, bool* recorded);
  // Kernels, and copies of weights.
  static uint64_t NumNodes(const Graph& graph);
  // Bytes of a graph's instances, from those so far. Only the driver knows what one takes.
  uint64_t Expected(const Graph& graph) const {
    return num_nodes_ == 0 ? 0 : instance_bytes_ * NumNodes(graph) / num_nodes_;
  }
  // Instantiates a piece. *code: kCuOutOfMemory: there is no room for it.
  Status InstantiatePiece(const Graph& graph, const Piece& piece, Execs* out, CuResult* code) const;
  bool IsCaptured(const Graph& graph, const Piece& piece) const;
  // Makes a graph of a piece: of what NCCL enqueues, of kernels that begin early, and of copies beside kernels, only by
  // capturing streams.
  Status RecordPiece(const Graph& graph, const Piece& piece, CuOwned<CuGraph, CuDestroyGraph>* out) const;
  Status Record(const Graph& graph, const Launches::Segment& segment, CuGraph into) const;
  // Enqueues or captures a piece.
  Status LaunchPiece(const Graph& graph, const Piece& piece, CuStreamHandle stream) const;
  Status EnqueuePiece(const Graph& graph, size_t index) const;
  // Enqueues a gathering of all rows of a graph: how many a step has, only the host knows.
  Status JoinOnGpu(const Graph& graph, const Launches::Segment& segment, CuStreamHandle stream) const;
  Status Join(const OneLaunch& operands, const Launches::Segment& segment, const StepRows& rows) const;

  CuMachinePtr machine_;
  const CuMemory& memory_;
  CuPointer scalars_;
  CuStreamHandle stream_;
  std::unique_ptr<CuWeightStream> weights_;  // nullptr: no graph streams any
  CuStream captured_;  // what is recorded by capturing: beside that, steps go on in stream_
  const bool early_;
  std::shared_ptr<Collective> ranks_;
  std::shared_ptr<const CuNccl> nccl_;  // outlives the graphs, as NCCL demands
  CuBuffer gathered_;  // rows of one rank behind those of the other
  CuPinned exchanged_;  // operands of a collective on their way
  uint32_t num_instances_ = 0;
  uint64_t instance_bytes_ = 0, num_nodes_ = 0;  // num_nodes_: of all instances
  std::vector<Graph> graphs_;
};

}  // namespace llmc
