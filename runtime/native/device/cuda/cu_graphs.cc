#include "device/cuda/cu_graphs.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "device/cuda/cu_arguments.h"

namespace llmc {

Status CuGraphs::Make(CuMachinePtr machine, const Artifact& artifact, const CuPrograms& programs,
                      const CuMemory& memory, const CuWork& work, CuStreamHandle stream, const CuGraphBudget& budget,
                      std::unique_ptr<CuGraphs>* out) {
  std::unique_ptr<CuGraphs> made(new CuGraphs(std::move(machine), work.step.get(), stream));
  made->graphs_.resize(artifact.graphs().size());
  for (size_t g = 0; g < artifact.graphs().size(); ++g) {
    static_cast<Launches&>(made->graphs_[g]) = Launches::Of(artifact, artifact.graphs()[g], programs, memory, work);
  }
  if (!budget.eager) {
    std::vector<size_t> order(made->graphs_.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_partition(order.begin(), order.end(), [&](size_t g) {
      return artifact.graphs()[g].phase == static_cast<uint32_t>(Phase::kDecode);
    });
    uint64_t free = 0;
    LLMC_RETURN_IF_ERROR(made->machine_->FreeBytes(&free));
    for (const size_t g : order) {
      Graph& graph = made->graphs_[g];
      LLMC_RETURN_IF_ERROR(made->Instantiate(graph, free, budget.bytes, &graph.exec));
      made->num_instances_ += graph.exec.get() != nullptr ? 1 : 0;
    }
  }
  *out = std::move(made);
  return Status::Ok();
}

Status CuGraphs::Launch(const OneLaunch& launch) const {
  CuArguments arguments(launch.places, scalars_);
  return machine_->Check("Launching a kernel",
                         (*machine_)->LaunchKernel(launch.kernel, launch.groups, 1, 1, launch.items, 1, 1, 0, stream_,
                                                   arguments.get(), nullptr));
}

Status CuGraphs::Record(const Graph& graph, CuGraph into) const {
  CuGraphNode last = nullptr;
  for (const OneLaunch& launch : graph.launches) {
    CuArguments arguments(launch.places, scalars_);
    const CuKernelNode node = {launch.kernel, {launch.groups, 1, 1}, {launch.items, 1, 1}, 0, arguments.get(), nullptr};
    CuGraphNode added = nullptr;
    LLMC_RETURN_IF_ERROR(machine_->Check(
        "Recording a graph", (*machine_)->GraphAddKernelNode(&added, into, last == nullptr ? nullptr : &last,
                                                             last == nullptr ? 0 : 1, &node)));
    last = added;
  }
  return Status::Ok();
}

Status CuGraphs::Instantiate(const Graph& graph, uint64_t free_before, uint64_t budget,
                             CuOwned<CuGraphExec, CuDestroyExec>* out) {
  if (instance_bytes_ >= budget) return Status::Ok();
  const CuMachine& cuda = *machine_;
  CuGraph recording = nullptr;
  LLMC_RETURN_IF_ERROR(cuda.Check("Making a graph", cuda->GraphCreate(&recording, 0)));
  const CuOwned<CuGraph, CuDestroyGraph> recorded(machine_, recording);
  LLMC_RETURN_IF_ERROR(Record(graph, recording));
  CuGraphExec made = nullptr;
  CuResult code = cuda->GraphInstantiate(&made, recording, 0);
  CuOwned<CuGraphExec, CuDestroyExec> exec;
  if (code == kCuSuccess) {
    exec = {machine_, made};
    code = cuda->GraphUpload(made, stream_);
  }
  // Without memory for a graph, its launches are enqueued one by one.
  if (code == kCuOutOfMemory) return Status::Ok();
  LLMC_RETURN_IF_ERROR(cuda.Check("Instantiating a graph", code));
  LLMC_RETURN_IF_ERROR(cuda.Check("Uploading a graph", cuda->StreamSynchronize(stream_)));
  uint64_t free = 0;
  LLMC_RETURN_IF_ERROR(cuda.FreeBytes(&free));
  const uint64_t taken = free_before - std::min(free, free_before);
  if (taken > budget) return Status::Ok();
  instance_bytes_ = taken;
  *out = std::move(exec);
  return Status::Ok();
}

Status CuGraphs::Enqueue(uint32_t graph) const {
  const Graph& of = graphs_[graph];
  if (of.exec.get() != nullptr) {
    return machine_->Check("Replaying a graph", (*machine_)->GraphLaunch(of.exec.get(), stream_));
  }
  for (const OneLaunch& launch : of.launches) LLMC_RETURN_IF_ERROR(Launch(launch));
  return Status::Ok();
}

}  // namespace llmc
