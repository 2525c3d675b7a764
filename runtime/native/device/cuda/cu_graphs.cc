#include "device/cuda/cu_graphs.h"

#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>

#include "device/cuda/cu_arguments.h"

namespace llmc {
namespace {

// Points the operands of a command that a load brings to the ring.
void PlaceInRing(const Artifact& artifact, const GraphRecord& graph, const RingLoad& load, uint32_t number,
                 CuPointer ring, std::vector<CuPointer>* places) {
  const CommandRecord& command = artifact.commands()[graph.first_command + number];
  for (uint32_t o = 0; o < command.num_operands; ++o) {
    const OperandRecord& operand = artifact.operands()[command.first_operand + o];
    if (static_cast<OperandKind>(operand.kind) != OperandKind::kWeight) continue;
    for (const RingLoad::Placed& one : load.weights) {
      if (one.weight == operand.index) (*places)[o] = ring + one.at + operand.offset;
    }
  }
}

}  // namespace

Status CuGraphs::Make(CuMachinePtr machine, const Artifact& artifact, const CuPrograms& programs,
                      const CuMemory& memory, const CuWork& work, CuStreamHandle stream, const GraphBudget& budget,
                      bool early, std::shared_ptr<Collective> ranks, std::shared_ptr<const CuNccl> nccl,
                      std::unique_ptr<CuGraphs>* out) {
  const uint32_t stage = ranks == nullptr ? 0 : ranks->stage();
  std::unique_ptr<CuGraphs> made(
      new CuGraphs(std::move(machine), memory, work.step.get(), stream, early, std::move(ranks), std::move(nccl)));
  const uint64_t exchanged = HostCollective::MostFloats(artifact) * sizeof(float);
  if (exchanged > 0) {
    LLMC_RETURN_IF_ERROR(TakePinned(made->machine_, "results of other ranks", exchanged, &made->exchanged_));
  }
  LLMC_RETURN_IF_ERROR(made->TakeGathered(artifact));
  made->graphs_.resize(artifact.graphs().size());
  for (size_t g = 0; g < artifact.graphs().size(); ++g) {
    static_cast<Launches&>(made->graphs_[g]) =
        Launches::Of(artifact, artifact.graphs()[g], programs, memory, work, stage);
    made->Divide(artifact.graphs()[g], &made->graphs_[g]);
    made->PlanLoads(artifact, artifact.graphs()[g], stage, &made->graphs_[g]);
  }
  LLMC_RETURN_IF_ERROR(made->MakeWeightStream());
  if (early || made->nccl_ != nullptr || made->weights_ != nullptr) {
    LLMC_RETURN_IF_ERROR(MakeStream(made->machine_, &made->captured_));
  }
  CuGraphs* graphs = made.get();
  LLMC_RETURN_IF_ERROR(
      RecordWithin(artifact.shape().graphs, budget, [&](uint32_t g, uint64_t room, uint64_t* taken, bool* recorded) {
        return graphs->Instantiate(&graphs->graphs_[g], room, taken, recorded);
      }));
  *out = std::move(made);
  return Status::Ok();
}

bool CuGraphs::JoinsOnGpu(const Launches::Segment& segment) const {
  return nccl_ != nullptr && segment.collective != nullptr &&
         segment.collective->op == static_cast<uint32_t>(CollectiveOp::kAllGather);
}

void CuGraphs::Divide(const GraphRecord& record, Graph* graph) const {
  graph->tokens = record.max_tokens;
  graph->samples = record.max_samples;
  size_t begin = 0;
  for (size_t i = 0; i < graph->segments.size(); ++i) {
    if (JoinsOnGpu(graph->segments[i]) && i + 1 < graph->segments.size()) continue;
    graph->pieces.push_back({begin, i + 1});
    begin = i + 1;
  }
}

void CuGraphs::PlanLoads(const Artifact& artifact, const GraphRecord& record, uint32_t stage, Graph* graph) const {
  const Offload& offload = memory_.offload();
  if (offload.ring_bytes() == 0) return;
  const std::vector<RingUse> uses = RingUsesOf(artifact, record, stage, offload.host_weights());
  size_t use = 0;
  for (Piece& piece : graph->pieces) {
    std::vector<RingUse> of_piece;
    for (; use < uses.size() && uses[use].command < graph->segments[piece.end - 1].end; ++use) {
      of_piece.push_back(uses[use]);
    }
    piece.loads = PlanRing(of_piece, offload.host_weights(), offload.ring_bytes());
    for (const RingLoad& load : piece.loads) {
      for (const RingUse& one : of_piece) {
        if (one.command < load.first || one.command > load.last) continue;
        PlaceInRing(artifact, record, load, one.command, memory_.ring(), &graph->launches[one.command].places);
      }
      for (const RingLoad::Copy& copy : load.copies) graph->streamed_bytes += copy.bytes;
    }
  }
}

Status CuGraphs::MakeWeightStream() {
  size_t most = 0;
  for (const Graph& graph : graphs_) {
    for (const Piece& piece : graph.pieces) most = std::max(most, piece.loads.size());
  }
  return most == 0 ? Status::Ok() : CuWeightStream::Make(machine_, memory_, most, &weights_);
}

uint64_t CuGraphs::NumNodes(const Graph& graph) {
  uint64_t nodes = graph.launches.size();
  for (const Piece& piece : graph.pieces) {
    for (const RingLoad& load : piece.loads) nodes += load.copies.size();
  }
  return nodes;
}

// Of one row nothing is rearranged.
Status CuGraphs::TakeGathered(const Artifact& artifact) {
  if (nccl_ == nullptr) return Status::Ok();
  uint64_t floats = 0;
  for (const GraphRecord& graph : artifact.graphs()) {
    const uint64_t rows = std::max(graph.max_tokens, graph.max_samples);
    for (const CollectiveRecord& one : artifact.collectives()) {
      if (one.op == static_cast<uint32_t>(CollectiveOp::kAllGather)) floats = std::max(floats, rows * one.width);
    }
  }
  return floats == 0 ? Status::Ok()
                     : TakeMemory(machine_, "results of other ranks", floats * sizeof(float), &gathered_);
}

// A kernel that begins early waits until the one before it has ended, and that one waited, too. So behind the wait all
// earlier kernels have ended: none reads what this one writes, and none writes what it reads. Before the wait it may only
// read weights, which no kernel writes, and scalars: those were copied before the graph's first kernel, which begins
// behind all earlier work. Copies, and kernels that do not wait, also begin behind all earlier work. Of weights that are
// streamed, the first reader does: CuWeightStream.
Status CuGraphs::Launch(const OneLaunch& launch, bool behind_kernel, CuStreamHandle stream) const {
  CuArguments arguments(launch.places, scalars_);
  if (early_ && behind_kernel) {
    CuLaunchAttribute begins_early{};
    begins_early.id = kCuProgrammaticSerialization;
    begins_early.value.allowed = 1;
    const CuLaunchConfig config = {{launch.groups, 1, 1}, {launch.items, 1, 1}, 0, stream, &begins_early, 1};
    return machine_->Check("Launching a kernel",
                           (*machine_)->LaunchKernelEx(&config, launch.kernel, arguments.get(), nullptr));
  }
  return machine_->Check("Launching a kernel",
                         (*machine_)->LaunchKernel(launch.kernel, launch.groups, 1, 1, launch.items, 1, 1, 0, stream,
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
  for (const Piece& piece : graph->pieces) {
    CuResult code = kCuSuccess;
    LLMC_RETURN_IF_ERROR(InstantiatePiece(*graph, piece, &execs, &code));
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
  num_nodes_ += NumNodes(*graph);
  return Status::Ok();
}

bool CuGraphs::IsCaptured(const Graph& graph, const Piece& piece) const {
  return early_ || JoinsOnGpu(graph.segments[piece.begin]) || !piece.loads.empty();
}

Status CuGraphs::RecordPiece(const Graph& graph, const Piece& piece, CuOwned<CuGraph, CuDestroyGraph>* out) const {
  const CuMachine& cuda = *machine_;
  CuGraph made = nullptr;
  if (!IsCaptured(graph, piece)) {
    LLMC_RETURN_IF_ERROR(cuda.Check("Making a graph", cuda->GraphCreate(&made, 0)));
    *out = {machine_, made};
    return Record(graph, graph.segments[piece.begin], made);
  }
  LLMC_RETURN_IF_ERROR(
      cuda.Check("Recording a graph", cuda->StreamBeginCapture(captured_.get(), kCuCaptureThreadLocal)));
  const Status enqueued = LaunchPiece(graph, piece, captured_.get());
  const CuResult code = cuda->StreamEndCapture(captured_.get(), &made);
  *out = {machine_, made};
  LLMC_RETURN_IF_ERROR(enqueued);
  return cuda.Check("Recording a graph", code);
}

Status CuGraphs::InstantiatePiece(const Graph& graph, const Piece& piece, Execs* out, CuResult* code) const {
  const CuMachine& cuda = *machine_;
  out->emplace_back();
  const Launches::Segment& first = graph.segments[piece.begin];
  if (first.begin == first.end && !JoinsOnGpu(first)) return Status::Ok();
  CuOwned<CuGraph, CuDestroyGraph> recorded;
  LLMC_RETURN_IF_ERROR(RecordPiece(graph, piece, &recorded));
  CuGraphExec made = nullptr;
  *code = cuda->GraphInstantiate(&made, recorded.get(), 0);
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
  const auto wait = [&] {
    CuResult code = kCuSuccess;
    LLMC_RETURN_IF_ERROR(AwaitStream(cuda, nccl_.get(), stream_, &code));
    return cuda.Check("A step on the GPU", code);
  };
  const auto to_device = [&](uint32_t operand, uint64_t bytes, const float* from) {
    return cuda.Check("Copying results of all ranks to the GPU",
                      cuda->MemcpyToDevice(operands.places[operand], from, bytes, stream_));
  };
  return JoinOnHost({*segment.collective, rows, ranks_.get(), segment.place}, ranks_.get(),
                    static_cast<float*>(exchanged_.get()), to_host, wait, to_device);
}

Status CuGraphs::LaunchPiece(const Graph& graph, const Piece& piece, CuStreamHandle stream) const {
  std::optional<CuWeightStream::Run> loads;
  if (!piece.loads.empty()) {
    loads.emplace(*weights_, piece.loads, stream);
    LLMC_RETURN_IF_ERROR(loads->Begin());
  }
  for (size_t i = piece.begin; i < piece.end; ++i) {
    const Launches::Segment& segment = graph.segments[i];
    for (size_t c = segment.begin; c < segment.end; ++c) {
      bool waits = false;
      if (loads) LLMC_RETURN_IF_ERROR(loads->Before(c, &waits));
      LLMC_RETURN_IF_ERROR(Launch(graph.launches[c], c > segment.begin && !waits, stream));
      if (loads) LLMC_RETURN_IF_ERROR(loads->Behind(c));
    }
    if (JoinsOnGpu(segment)) LLMC_RETURN_IF_ERROR(JoinOnGpu(graph, segment, stream));
  }
  return Status::Ok();
}

Status CuGraphs::JoinOnGpu(const Graph& graph, const Launches::Segment& segment, CuStreamHandle stream) const {
  const CollectiveRecord& record = *segment.collective;
  const std::vector<CuPointer>& places = graph.launches[segment.joint].places;
  const bool tokens = record.rows == static_cast<uint32_t>(CollectiveRows::kTokens);
  const uint64_t rows = tokens ? graph.tokens : graph.samples, ranks = nccl_->num_ranks(), part = record.width / ranks;
  if (rows == 1) return nccl_->AllGather(places[0], places[1], part, stream);
  LLMC_RETURN_IF_ERROR(nccl_->AllGather(places[0], gathered_.get(), rows * part, stream));
  // To columns of the rank.
  CuCopy2D copy{};
  copy.from_type = copy.to_type = kCuMemoryOfDevice;
  copy.width = copy.from_pitch = part * sizeof(float);
  copy.to_pitch = record.width * sizeof(float);
  copy.height = rows;
  for (uint64_t r = 0; r < ranks; ++r) {
    copy.from = gathered_.get() + r * rows * copy.width;
    copy.to = places[1] + r * copy.width;
    LLMC_RETURN_IF_ERROR(machine_->Check("Rearranging results of all ranks", (*machine_)->Memcpy2D(&copy, stream)));
  }
  return Status::Ok();
}

Status CuGraphs::EnqueuePiece(const Graph& graph, size_t index) const {
  const Piece& piece = graph.pieces[index];
  std::unique_lock<std::mutex> lock(memory_.ring_mutex(), std::defer_lock);
  if (!piece.loads.empty()) lock.lock();
  if (graph.execs.empty()) {
    const Status enqueued = LaunchPiece(graph, piece, stream_);
    if (enqueued.ok() || piece.loads.empty()) return enqueued;
    // Copies that no kernel waits for must not go on beside later steps.
    CuResult code = kCuSuccess;
    static_cast<void>(AwaitStream(*machine_, nccl_.get(), weights_->copies(), &code).ok());
    return enqueued;
  }
  const CuGraphExec exec = graph.execs[index].get();
  return exec == nullptr ? Status::Ok() : machine_->Check("Replaying a graph", (*machine_)->GraphLaunch(exec, stream_));
}

Status CuGraphs::Enqueue(uint32_t graph, const StepRows& rows) const {
  const Graph& of = graphs_[graph];
  for (size_t i = 0; i < of.pieces.size(); ++i) {
    LLMC_RETURN_IF_ERROR(EnqueuePiece(of, i));
    const Launches::Segment& last = of.segments[of.pieces[i].end - 1];
    if (last.collective == nullptr || JoinsOnGpu(last)) continue;
    LLMC_RETURN_IF_ERROR(Join(of.launches[last.joint], last, rows));
  }
  return Status::Ok();
}

Status CuGraphs::EnqueueCommand(uint32_t graph, uint32_t command) const {
  const Graph& of = graphs_[graph];
  const std::lock_guard<std::mutex> lock(memory_.ring_mutex());
  for (const Piece& piece : of.pieces) {
    for (const RingLoad& load : piece.loads) {
      if (load.first <= command && command <= load.last) LLMC_RETURN_IF_ERROR(weights_->Copy(load, stream_));
    }
  }
  return Launch(of.launches[command], false, stream_);
}

}  // namespace llmc
