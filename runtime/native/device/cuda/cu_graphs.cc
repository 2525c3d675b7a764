#include "device/cuda/cu_graphs.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "device/cuda/cu_arguments.h"

namespace llmc {

Status CuGraphs::Make(CuMachinePtr machine, const Artifact& artifact, const CuPrograms& programs,
                      const CuMemory& memory, const CuWork& work, CuStreamHandle stream, const CuGraphBudget& budget,
                      std::shared_ptr<Collective> ranks, std::unique_ptr<CuGraphs>* out) {
  const uint32_t stage = ranks == nullptr ? 0 : ranks->stage();
  std::unique_ptr<CuGraphs> made(new CuGraphs(std::move(machine), work.step.get(), stream, std::move(ranks)));
  const uint64_t exchanged = HostCollective::MostFloats(artifact) * sizeof(float);
  if (exchanged > 0) {
    LLMC_RETURN_IF_ERROR(TakePinned(made->machine_, "results of other ranks", exchanged, &made->exchanged_));
  }
  made->graphs_.resize(artifact.graphs().size());
  for (size_t g = 0; g < artifact.graphs().size(); ++g) {
    static_cast<Launches&>(made->graphs_[g]) =
        Launches::Of(artifact, artifact.graphs()[g], programs, memory, work, stage);
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
      LLMC_RETURN_IF_ERROR(made->Instantiate(graph, free, budget.bytes, &graph.execs));
      made->num_instances_ += graph.execs.empty() ? 0 : 1;
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

Status CuGraphs::Record(const Graph& graph, const Launches::Segment& segment, CuGraph into) const {
  CuGraphNode last = nullptr;
  for (size_t c = segment.begin; c < segment.end; ++c) {
    const OneLaunch& launch = graph.launches[c];
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

Status CuGraphs::Instantiate(const Graph& graph, uint64_t free_before, uint64_t budget, Execs* out) {
  if (instance_bytes_ >= budget) return Status::Ok();
  const CuMachine& cuda = *machine_;
  Execs execs;
  for (const Launches::Segment& segment : graph.segments) {
    CuResult code = kCuSuccess;
    LLMC_RETURN_IF_ERROR(InstantiateSegment(graph, segment, &execs, &code));
    // Without memory for a graph, its launches are enqueued one by one.
    if (code == kCuOutOfMemory) return Status::Ok();
  }
  LLMC_RETURN_IF_ERROR(cuda.Check("Uploading a graph", cuda->StreamSynchronize(stream_)));
  uint64_t free = 0;
  LLMC_RETURN_IF_ERROR(cuda.FreeBytes(&free));
  const uint64_t taken = free_before - std::min(free, free_before);
  if (taken > budget) return Status::Ok();
  instance_bytes_ = taken;
  *out = std::move(execs);
  return Status::Ok();
}

Status CuGraphs::InstantiateSegment(const Graph& graph, const Launches::Segment& segment, Execs* out,
                                    CuResult* code) const {
  const CuMachine& cuda = *machine_;
  out->emplace_back();
  if (segment.begin == segment.end) return Status::Ok();
  CuGraph recording = nullptr;
  LLMC_RETURN_IF_ERROR(cuda.Check("Making a graph", cuda->GraphCreate(&recording, 0)));
  const CuOwned<CuGraph, CuDestroyGraph> recorded(machine_, recording);
  LLMC_RETURN_IF_ERROR(Record(graph, segment, recording));
  CuGraphExec made = nullptr;
  *code = cuda->GraphInstantiate(&made, recording, 0);
  if (*code == kCuSuccess) {
    out->back() = {machine_, made};
    *code = cuda->GraphUpload(made, stream_);
  }
  return *code == kCuOutOfMemory ? Status::Ok() : cuda.Check("Instantiating a graph", *code);
}

Status CuGraphs::Join(const OneLaunch& operands, const CollectiveRecord& record, const StepRows& rows) const {
  const CuMachine& cuda = *machine_;
  const auto to_host = [&](uint32_t operand, uint64_t bytes, float* to) {
    return cuda.Check("Reading results for other ranks",
                      cuda->MemcpyToHost(to, operands.places[operand], bytes, stream_));
  };
  const auto wait = [&] { return cuda.Check("A step on the GPU", cuda->StreamSynchronize(stream_)); };
  const auto to_device = [&](uint32_t operand, uint64_t bytes, const float* from) {
    return cuda.Check("Copying results of all ranks to the GPU",
                      cuda->MemcpyToDevice(operands.places[operand], from, bytes, stream_));
  };
  return JoinOnHost({record, rows, ranks_.get()}, ranks_.get(), static_cast<float*>(exchanged_.get()), to_host, wait,
                    to_device);
}

Status CuGraphs::Enqueue(uint32_t graph, const StepRows& rows) const {
  const Graph& of = graphs_[graph];
  for (size_t i = 0; i < of.segments.size(); ++i) {
    const Launches::Segment& segment = of.segments[i];
    if (of.execs.empty()) {
      for (size_t c = segment.begin; c < segment.end; ++c) LLMC_RETURN_IF_ERROR(Launch(of.launches[c]));
    } else if (of.execs[i].get() != nullptr) {
      LLMC_RETURN_IF_ERROR(machine_->Check("Replaying a graph", (*machine_)->GraphLaunch(of.execs[i].get(), stream_)));
    }
    if (segment.collective == nullptr) continue;
    LLMC_RETURN_IF_ERROR(Join(of.launches[segment.joint], *segment.collective, rows));
  }
  return Status::Ok();
}

}  // namespace llmc
