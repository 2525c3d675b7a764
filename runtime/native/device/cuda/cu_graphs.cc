#include "device/cuda/cu_graphs.h"

#include <algorithm>
#include <utility>

#include "device/cuda/cu_arguments.h"

namespace llmc {

Status CuGraphs::Make(CuMachinePtr machine, const Artifact& artifact, const CuPrograms& programs,
                      const CuMemory& memory, const CuWork& work, CuStreamHandle stream, const GraphBudget& budget,
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
  CuGraphs* graphs = made.get();
  LLMC_RETURN_IF_ERROR(
      RecordWithin(artifact.shape().graphs, budget, [&](uint32_t g, uint64_t room, uint64_t* taken, bool* recorded) {
        return graphs->Instantiate(&graphs->graphs_[g], room, taken, recorded);
      }));
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

Status CuGraphs::Instantiate(Graph* graph, uint64_t room, uint64_t* taken, bool* recorded) {
  if (room == 0 || Expected(*graph) > room) return Status::Ok();
  const CuMachine& cuda = *machine_;
  uint64_t free_before = 0, free = 0;
  LLMC_RETURN_IF_ERROR(cuda.FreeBytes(&free_before));
  Execs execs;
  for (const Launches::Segment& segment : graph->segments) {
    CuResult code = kCuSuccess;
    LLMC_RETURN_IF_ERROR(InstantiateSegment(*graph, segment, &execs, &code));
    // Without memory for a graph, its launches are enqueued one by one.
    if (code == kCuOutOfMemory) return Status::Ok();
  }
  LLMC_RETURN_IF_ERROR(cuda.Check("Uploading a graph", cuda->StreamSynchronize(stream_)));
  LLMC_RETURN_IF_ERROR(cuda.FreeBytes(&free));
  const uint64_t bytes = free_before - std::min(free, free_before);
  if (bytes > room) return Status::Ok();
  graph->execs = std::move(execs);
  *taken = bytes;
  *recorded = true;
  ++num_instances_;
  instance_bytes_ += bytes;
  num_nodes_ += graph->launches.size();
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

Status CuGraphs::Join(const OneLaunch& operands, const Launches::Segment& segment, const StepRows& rows) const {
  const CuMachine& cuda = *machine_;
  // An offloaded bias is in memory of the host, of which only this copy may read.
  const auto to_host = [&](uint32_t operand, uint64_t bytes, float* to) {
    return cuda.Check("Reading results for other ranks",
                      cuda->Memcpy(reinterpret_cast<CuPointer>(to), operands.places[operand], bytes, stream_));
  };
  const auto wait = [&] { return cuda.Check("A step on the GPU", cuda->StreamSynchronize(stream_)); };
  const auto to_device = [&](uint32_t operand, uint64_t bytes, const float* from) {
    return cuda.Check("Copying results of all ranks to the GPU",
                      cuda->MemcpyToDevice(operands.places[operand], from, bytes, stream_));
  };
  return JoinOnHost({*segment.collective, rows, ranks_.get(), segment.place}, ranks_.get(),
                    static_cast<float*>(exchanged_.get()), to_host, wait, to_device);
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
    LLMC_RETURN_IF_ERROR(Join(of.launches[segment.joint], segment, rows));
  }
  return Status::Ok();
}

}  // namespace llmc
