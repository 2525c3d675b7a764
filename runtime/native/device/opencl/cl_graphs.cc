#include "device/opencl/cl_graphs.h"

#include <string>

#include "device/opencl/cl_arguments.h"

namespace llmc {

ClGraphs::~ClGraphs() {
  for (Graph& graph : graphs_) Release(&graph);
}

void ClGraphs::Release(Graph* graph) const {
  for (cl_kernel kernel : graph->kernels) (*machine_)->ReleaseKernel(kernel);
  for (const Recording& recording : graph->recordings) {
    for (cl_command_buffer buffer : recording) {
      if (buffer != nullptr) machine_->command_buffers()->ReleaseCommandBuffer(buffer);
    }
  }
  graph->kernels.clear();
  graph->recordings.clear();
}

Status ClGraphs::Make(std::shared_ptr<const ClMachine> machine, const Artifact& artifact, const ClPrograms& programs,
                      const ClMemory& memory, const ClWork& work, cl_command_queue queue, uint32_t in_flight,
                      const GraphBudget& budget, std::shared_ptr<Collective> ranks, std::unique_ptr<ClGraphs>* out) {
  const uint32_t stage = ranks == nullptr ? 0 : ranks->stage();
  std::unique_ptr<ClGraphs> made(new ClGraphs(std::move(machine), work.step.get(), queue, std::move(ranks)));
  made->exchanged_.resize(HostCollective::MostFloats(artifact));
  made->graphs_.resize(artifact.graphs().size());
  for (size_t g = 0; g < artifact.graphs().size(); ++g) {
    static_cast<Launches&>(made->graphs_[g]) =
        Launches::Of(artifact, artifact.graphs()[g], programs, memory, work, stage);
  }
  ClGraphs* graphs = made.get();
  if (graphs->machine_->command_buffers() != nullptr) {
    const uint32_t recordings = graphs->machine_->replays_overlap() ? 1 : in_flight;
    const auto record = [&](uint32_t graph, uint64_t room, uint64_t* taken, bool* recorded) {
      return graphs->RecordOne(artifact, programs, graph, recordings, room, taken, recorded);
    };
    LLMC_RETURN_IF_ERROR(RecordWithin(artifact.shape().graphs, budget, record));
  }
  *out = std::move(made);
  return Status::Ok();
}

// Without memory for a recording, launches are enqueued one by one, with the kernels that all graphs share.
Status ClGraphs::RecordOne(const Artifact& artifact, const ClPrograms& programs, uint32_t graph, uint32_t recordings,
                           uint64_t room, uint64_t* taken, bool* recorded) {
  const GraphRecord& of = artifact.graphs()[graph];
  Graph* into = &graphs_[graph];
  const auto kernels = static_cast<uint64_t>(std::count_if(into->launches.begin(), into->launches.end(),
                                                           [](const OneLaunch& one) { return one.kernel != nullptr; }));
  const uint64_t bytes = kClCommandBytes * kernels * recordings;
  if (bytes > room) return Status::Ok();
  const Status status = RecordInto(artifact, programs, of, recordings, into);
  if (status.code == LLMC_ERR_OUT_OF_MEMORY) {
    Release(into);
    for (uint32_t c = 0; c < of.num_commands; ++c) {
      if (into->launches[c].kernel == nullptr) continue;
      into->launches[c].kernel = programs.kernel(artifact.commands()[of.first_command + c].kernel);
    }
    return Status::Ok();
  }
  LLMC_RETURN_IF_ERROR(status);
  ++num_recorded_;
  recorded_bytes_ += bytes;
  *taken = bytes;
  *recorded = true;
  return Status::Ok();
}

// A recorded command gets a kernel object of its own: PoCL 3.1 reads the arguments from that when it replays.
Status ClGraphs::RecordInto(const Artifact& artifact, const ClPrograms& programs, const GraphRecord& of,
                            uint32_t recordings, Graph* graph) const {
  graph->kernels.reserve(of.num_commands);
  for (uint32_t c = 0; c < of.num_commands; ++c) {
    cl_kernel* shared = &graph->launches[c].kernel;
    if (*shared == nullptr) continue;  // of another stage, or a collective
    cl_kernel kernel = nullptr;
    LLMC_RETURN_IF_ERROR(programs.Another(artifact.commands()[of.first_command + c].kernel, &kernel));
    graph->kernels.push_back(kernel);
    *shared = kernel;
  }
  for (uint32_t i = 0; i < recordings; ++i) LLMC_RETURN_IF_ERROR(Record(graph));
  return Status::Ok();
}

Status ClGraphs::Launch(const OneLaunch& launch) const {
  LLMC_RETURN_IF_ERROR(SetArguments(*machine_, launch.kernel, launch.places, scalars_));
  const size_t items = launch.items, all = items * launch.groups;
  LLMC_RETURN_IF_CL_ERROR(
      "Launching a kernel on '" + machine_->name() + "'",
      (*machine_)->EnqueueNDRangeKernel(queue_, launch.kernel, 1, nullptr, &all, &items, 0, nullptr, nullptr));
  return Status::Ok();
}

Status ClGraphs::Record(Graph* graph) const {
  graph->recordings.emplace_back();
  for (const Launches::Segment& segment : graph->segments) {
    graph->recordings.back().push_back(nullptr);
    if (segment.begin == segment.end) continue;
    LLMC_RETURN_IF_ERROR(RecordSegment(*graph, segment, &graph->recordings.back().back()));
  }
  return Status::Ok();
}

Status ClGraphs::RecordSegment(const Graph& graph, const Launches::Segment& segment, cl_command_buffer* out) const {
  const ClCommandBufferFunctions& record = *machine_->command_buffers();
  const std::string doing = "Recording a graph on '" + machine_->name() + "'";
  cl_int code = kClSuccess;
  const cl_properties overlaps[] = {kClCommandBufferFlags, kClCommandBufferOverlaps, 0};
  *out = record.CreateCommandBuffer(1, &queue_, machine_->replays_overlap() ? overlaps : nullptr, &code);
  LLMC_RETURN_IF_CL_ERROR(doing, code);
  cl_uint last = 0;
  for (size_t c = segment.begin; c < segment.end; ++c) {
    const OneLaunch& launch = graph.launches[c];
    LLMC_RETURN_IF_ERROR(SetArguments(*machine_, launch.kernel, launch.places, scalars_));
    // Each command waits for the one before it: some drivers do not keep the order of a recording.
    const bool first = c == segment.begin;
    const size_t items = launch.items, all = items * launch.groups;
    cl_uint done = 0;
    LLMC_RETURN_IF_CL_ERROR(doing,
                            record.CommandNDRangeKernel(*out, nullptr, nullptr, launch.kernel, 1, nullptr, &all, &items,
                                                        first ? 0 : 1, first ? nullptr : &last, &done, nullptr));
    last = done;
  }
  LLMC_RETURN_IF_CL_ERROR(doing, record.FinalizeCommandBuffer(*out));
  return Status::Ok();
}

// buffer: nullptr: none was recorded.
Status ClGraphs::EnqueueSegment(const Graph& graph, const Launches::Segment& segment, cl_command_buffer buffer) const {
  if (buffer != nullptr) {
    LLMC_RETURN_IF_CL_ERROR("Replaying a graph on '" + machine_->name() + "'",
                            machine_->command_buffers()->EnqueueCommandBuffer(0, nullptr, buffer, 0, nullptr, nullptr));
    return Status::Ok();
  }
  for (size_t c = segment.begin; c < segment.end; ++c) LLMC_RETURN_IF_ERROR(Launch(graph.launches[c]));
  return Status::Ok();
}

Status ClGraphs::Join(const OneLaunch& operands, const Launches::Segment& segment, const StepRows& rows) {
  const ClMachine& cl = *machine_;
  const auto offset = [&](uint32_t operand) { return static_cast<uint64_t>(operands.places[operand].at) * kAlignment; };
  const auto to_host = [&](uint32_t operand, uint64_t bytes, float* to) {
    LLMC_RETURN_IF_CL_ERROR("Reading results for other ranks from '" + cl.name() + "'",
                            cl->EnqueueReadBuffer(queue_, operands.places[operand].memory, kClFalse, offset(operand),
                                                  bytes, to, 0, nullptr, nullptr));
    return Status::Ok();
  };
  const auto wait = [&] {
    LLMC_RETURN_IF_CL_ERROR("A step on '" + cl.name() + "'", cl->Finish(queue_));
    return Status::Ok();
  };
  const auto to_device = [&](uint32_t operand, uint64_t bytes, const float* from) {
    LLMC_RETURN_IF_CL_ERROR("Copying results of all ranks to '" + cl.name() + "'",
                            cl->EnqueueWriteBuffer(queue_, operands.places[operand].memory, kClFalse, offset(operand),
                                                   bytes, from, 0, nullptr, nullptr));
    return Status::Ok();
  };
  return JoinOnHost({*segment.collective, rows, ranks_.get(), segment.place}, ranks_.get(), exchanged_.data(), to_host,
                    wait, to_device);
}

Status ClGraphs::Enqueue(uint32_t graph, const StepRows& rows) {
  Graph& of = graphs_[graph];
  const Recording* recording = nullptr;
  if (!of.recordings.empty()) {
    recording = &of.recordings[of.next];
    of.next = (of.next + 1) % of.recordings.size();
  }
  for (size_t i = 0; i < of.segments.size(); ++i) {
    const Launches::Segment& segment = of.segments[i];
    LLMC_RETURN_IF_ERROR(EnqueueSegment(of, segment, recording == nullptr ? nullptr : (*recording)[i]));
    if (segment.collective == nullptr) continue;
    LLMC_RETURN_IF_ERROR(Join(of.launches[segment.joint], segment, rows));
  }
  return Status::Ok();
}

}  // namespace llmc
