#include "device/opencl/cl_graphs.h"

#include <string>

#include "device/opencl/cl_arguments.h"

namespace llmc {

ClGraphs::~ClGraphs() {
  for (const Graph& graph : graphs_) {
    for (cl_kernel kernel : graph.kernels) (*machine_)->ReleaseKernel(kernel);
    for (cl_command_buffer buffer : graph.buffers) machine_->command_buffers()->ReleaseCommandBuffer(buffer);
  }
}

Status ClGraphs::Make(std::shared_ptr<const ClMachine> machine, const Artifact& artifact, const ClPrograms& programs,
                      const ClMemory& memory, const ClWork& work, cl_command_queue queue, uint32_t in_flight,
                      std::unique_ptr<ClGraphs>* out) {
  std::unique_ptr<ClGraphs> made(new ClGraphs(std::move(machine), work.step.get(), queue));
  made->recorded_ = in_flight > 0 && made->machine_->command_buffers() != nullptr;
  const uint32_t recordings = !made->recorded_ ? 0 : made->machine_->replays_overlap() ? 1 : in_flight;
  made->graphs_.resize(artifact.graphs().size());
  for (size_t g = 0; g < artifact.graphs().size(); ++g) {
    const GraphRecord& record_of = artifact.graphs()[g];
    Graph& graph = made->graphs_[g];
    static_cast<Launches&>(graph) = Launches::Of(artifact, record_of, programs, memory, work);
    if (!made->recorded_) continue;
    // A recorded command gets a kernel object of its own: PoCL 3.1 reads the arguments from that when it replays.
    graph.kernels.reserve(record_of.num_commands);
    for (uint32_t c = 0; c < record_of.num_commands; ++c) {
      cl_kernel* kernel = &graph.launches[c].kernel;
      LLMC_RETURN_IF_ERROR(programs.Another(artifact.commands()[record_of.first_command + c].kernel, kernel));
      graph.kernels.push_back(*kernel);
    }
    for (uint32_t i = 0; i < recordings; ++i) LLMC_RETURN_IF_ERROR(made->Record(&graph));
  }
  *out = std::move(made);
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
  const ClCommandBufferFunctions& record = *machine_->command_buffers();
  const std::string doing = "Recording a graph on '" + machine_->name() + "'";
  cl_int code = kClSuccess;
  const cl_properties overlaps[] = {kClCommandBufferFlags, kClCommandBufferOverlaps, 0};
  cl_command_buffer buffer =
      record.CreateCommandBuffer(1, &queue_, machine_->replays_overlap() ? overlaps : nullptr, &code);
  LLMC_RETURN_IF_CL_ERROR(doing, code);
  graph->buffers.push_back(buffer);
  cl_uint last = 0;
  for (const OneLaunch& launch : graph->launches) {
    LLMC_RETURN_IF_ERROR(SetArguments(*machine_, launch.kernel, launch.places, scalars_));
    // Each command waits for the one before it: some drivers do not keep the order of a recording.
    const bool first = &launch == graph->launches.data();
    const size_t items = launch.items, all = items * launch.groups;
    cl_uint done = 0;
    LLMC_RETURN_IF_CL_ERROR(
        doing, record.CommandNDRangeKernel(buffer, nullptr, nullptr, launch.kernel, 1, nullptr, &all, &items,
                                           first ? 0 : 1, first ? nullptr : &last, &done, nullptr));
    last = done;
  }
  LLMC_RETURN_IF_CL_ERROR(doing, record.FinalizeCommandBuffer(buffer));
  return Status::Ok();
}

Status ClGraphs::Enqueue(uint32_t graph) {
  Graph& of = graphs_[graph];
  if (!of.buffers.empty()) {
    cl_command_buffer buffer = of.buffers[of.next];
    of.next = (of.next + 1) % of.buffers.size();
    LLMC_RETURN_IF_CL_ERROR("Replaying a graph on '" + machine_->name() + "'",
                            machine_->command_buffers()->EnqueueCommandBuffer(0, nullptr, buffer, 0, nullptr, nullptr));
    return Status::Ok();
  }
  for (const OneLaunch& launch : of.launches) LLMC_RETURN_IF_ERROR(Launch(launch));
  return Status::Ok();
}

}  // namespace llmc
