// ClGraphs: the graphs of an artifact as kernel launches, recorded once if the device has command buffers.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "artifact/artifact.h"
#include "collective/collective.h"
#include "core/status.h"
#include "device/gpu/graph_budget.h"
#include "device/gpu/graph_launches.h"
#include "device/gpu/host_collective.h"
#include "device/opencl/cl_memory.h"
#include "device/opencl/cl_programs.h"

namespace llmc {

// Bytes of a recorded command, as budgets count them: OpenCL does not tell what a driver takes for its code, arguments
// and state. An estimate.
constexpr uint64_t kClCommandBytes = 4096;

class ClGraphs {
 public:
  // in_flight: replays of a graph that may be on their way at a time, 1 or 2. Graphs beyond the budget run as launches,
  // and all do if the device has no command buffers. ranks: what this device is one of; nullptr: it is alone. Programs,
  // memory and work must outlive the graphs.
  static Status Make(std::shared_ptr<const ClMachine> machine, const Artifact& artifact, const ClPrograms& programs,
                     const ClMemory& memory, const ClWork& work, cl_command_queue queue, uint32_t in_flight,
                     const GraphBudget& budget, std::shared_ptr<Collective> ranks, std::unique_ptr<ClGraphs>* out);
  ~ClGraphs();
  ClGraphs(const ClGraphs&) = delete;
  ClGraphs& operator=(const ClGraphs&) = delete;

  const StepLayout& inputs(uint32_t graph) const { return graphs_[graph].inputs; }
  uint32_t num_recorded() const { return num_recorded_; }
  uint64_t recorded_bytes() const { return recorded_bytes_; }
  bool is_recorded(uint32_t graph) const { return !graphs_[graph].recordings.empty(); }
  const ClPlace& place(uint32_t graph, uint32_t command, uint32_t operand) const {
    return graphs_[graph].launches[command].places[operand];
  }
  // Forms of a graph, which Enqueue uses in turn.
  size_t num_forms(uint32_t graph) const { return std::max<size_t>(graphs_[graph].recordings.size(), 1); }
  uint64_t streamed_bytes(uint32_t) const { return 0; }  // kernels read offloaded weights in place
  // Enqueues a graph. Of several ranks it returns behind the last result that they exchange.
  Status Enqueue(uint32_t graph, const StepRows& rows);
  // Enqueues one command of a graph.
  Status EnqueueCommand(uint32_t graph, uint32_t command) const { return Launch(graphs_[graph].launches[command]); }

 private:
  using Launches = GraphLaunches<cl_kernel, ClPlace>;
  using OneLaunch = Launches::Launch;
  // A command buffer for each segment; nullptr for one without launches.
  using Recording = std::vector<cl_command_buffer>;
  struct Graph : Launches {
    std::vector<cl_kernel> kernels;  // its own, in the order of launches
    // They take turns: one that runs may not be enqueued again, unless the device can do that.
    std::vector<Recording> recordings;
    size_t next = 0;
  };
  ClGraphs(std::shared_ptr<const ClMachine> machine, cl_mem scalars, cl_command_queue queue,
           std::shared_ptr<Collective> ranks)
      : machine_(std::move(machine)), scalars_(scalars), queue_(queue), ranks_(std::move(ranks)) {}
  Status Launch(const OneLaunch& launch) const;
  // Records a graph, as RecordGraph says, `recordings` times.
  Status RecordOne(const Artifact& artifact, const ClPrograms& programs, uint32_t graph, uint32_t recordings,
                   uint64_t room, uint64_t* taken, bool* recorded);
  Status RecordInto(const Artifact& artifact, const ClPrograms& programs, const GraphRecord& of, uint32_t recordings,
                    Graph* graph) const;
  Status Record(Graph* graph) const;
  void Release(Graph* graph) const;
  Status RecordSegment(const Graph& graph, const Launches::Segment& segment, cl_command_buffer* out) const;
  Status EnqueueSegment(const Graph& graph, const Launches::Segment& segment, cl_command_buffer buffer) const;
  Status Join(const OneLaunch& operands, const Launches::Segment& segment, const StepRows& rows);

  std::shared_ptr<const ClMachine> machine_;
  cl_mem scalars_;
  cl_command_queue queue_;
  std::shared_ptr<Collective> ranks_;
  std::vector<float> exchanged_;  // operands of a collective on their way
  uint32_t num_recorded_ = 0;
  uint64_t recorded_bytes_ = 0;
  std::vector<Graph> graphs_;
};

}  // namespace llmc
