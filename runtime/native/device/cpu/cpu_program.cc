#include "device/cpu/cpu_program.h"

#include <algorithm>
#include <utility>

namespace llmc {
namespace {

constexpr uint32_t kTasksOfThread = 4;  // most tasks per thread: each task of many rows widens them again
// The same for attention and experts in a graph of many rows: their tasks differ in size.
constexpr uint32_t kUnequalTasksOfThread = 16, kManyRows = 64;

// Number of parts of the weight that a command's kernel streams; 0 if it streams none or is a collective.
uint32_t WeightPartsOf(const Artifact& artifact, const CommandRecord& command) {
  return artifact.collective(command) != nullptr ? 0 : LaunchOf(artifact.kernels()[command.kernel]).weight_parts;
}

}  // namespace

Status CpuProgram::Make(std::shared_ptr<const Artifact> of, std::shared_ptr<const CpuCode> code, const Memory& memory,
                        uint32_t num_threads, const CpuArena* arena, CpuProgram* out) {
  const Artifact& artifact = *of;
  out->artifact_ = std::move(of);
  out->code_ = std::move(code);
  if (arena != nullptr && arena->pages->size() >= artifact.max_arena_bytes()) {
    out->arena_ = *arena;
  } else {
    auto pages = std::make_shared<Pages>();
    LLMC_RETURN_IF_ERROR(Pages::Allocate(artifact.max_arena_bytes(), "arena", pages.get()));
    out->arena_.pages = std::move(pages);
  }

  // One region for inputs, logits and hidden states, each sized for the largest graph.
  uint64_t offsets[kNumInputs + 2] = {}, bytes = 0, max_samples = 0, max_tokens = 0;
  for (uint32_t i = 0; i < kNumInputs; ++i) {
    uint64_t largest = 0;
    for (const GraphRecord& graph : artifact.graphs()) {
      if (artifact.has_input(i)) largest = std::max(largest, InputBytes(graph, i));
    }
    offsets[i] = bytes;
    bytes += largest;
  }
  for (const GraphRecord& graph : artifact.graphs()) {
    max_samples = std::max<uint64_t>(max_samples, graph.max_samples);
    max_tokens = std::max<uint64_t>(max_tokens, graph.max_tokens);
  }
  offsets[kNumInputs] = bytes;
  bytes += RoundUp(max_samples * artifact.shape().output_width() * sizeof(float), kAlignment);
  const uint64_t width = static_cast<uint32_t>(artifact.shape().states_width);
  offsets[kNumInputs + 1] = bytes;
  bytes += RoundUp(max_tokens * width * sizeof(float), kAlignment);
  LLMC_RETURN_IF_ERROR(Pages::Allocate(bytes, "inputs and logits", &out->io_));
  for (uint32_t i = 0; i < kNumInputs; ++i) out->inputs_[i] = reinterpret_cast<int32_t*>(out->io_.data() + offsets[i]);
  out->logits_ = reinterpret_cast<float*>(out->io_.data() + offsets[kNumInputs]);
  if (width > 0) out->states_ = reinterpret_cast<float*>(out->io_.data() + offsets[kNumInputs + 1]);
  out->weights_ = memory.weights;
  out->pool_ = &memory.pool;
  out->adapters_ = &memory.adapters;
  out->stage_ = memory.stage;
  out->steps_.resize(artifact.graphs().size());
  out->graphs_.resize(artifact.graphs().size());
  for (uint32_t g = 0; g < artifact.graphs().size(); ++g) {
    out->longest_ = std::max<std::size_t>(out->longest_, artifact.graphs()[g].num_commands);
    out->Resolve(g, num_threads);
  }
  return Status::Ok();
}

void* CpuProgram::Address(const OperandRecord& operand) const {
  switch (static_cast<OperandKind>(operand.kind)) {
    case OperandKind::kArena: return arena_.pages->data() + operand.offset;
    case OperandKind::kWeight: return weights_ == nullptr ? nullptr : weights_->address(operand.index) + operand.offset;
    case OperandKind::kInput: return reinterpret_cast<char*>(inputs_[operand.index]) + operand.offset;
    case OperandKind::kKeyPool: return pool_->keys(operand.index);
    case OperandKind::kValuePool: return pool_->values(operand.index);
    case OperandKind::kOutput: return reinterpret_cast<char*>(logits_) + operand.offset;
    case OperandKind::kAdapters: return adapters_->pool(operand.index);
    case OperandKind::kStates: return reinterpret_cast<char*>(states_) + operand.offset;
  }
  return nullptr;
}

// Whether the first stage takes the results of the last one: the last commands of its graphs.
bool CpuProgram::TakesResults(const Step& step) const {
  return stage_ == 0 && step.collective != nullptr &&
         step.collective->op == static_cast<uint32_t>(CollectiveOp::kPassOn) &&
         step.collective->stage + 1 == artifact_->num_stages();
}

void CpuProgram::Resolve(uint32_t graph, uint32_t num_threads) {
  const Artifact& artifact = *artifact_;
  const GraphRecord& record = artifact.graphs()[graph];
  std::vector<Step> steps;
  steps.reserve(record.num_commands);
  StageWalk walk(artifact, record);
  for (uint32_t c = 0; c < record.num_commands; ++c) {
    const CommandRecord& command = artifact.commands()[record.first_command + c];
    if (!walk.Runs(command, stage_)) continue;
    Step step{};
    step.command = c;
    step.collective = artifact.collective(command);
    step.function = step.collective != nullptr ? nullptr : code_->function(command.kernel);
    step.place = walk.place();
    step.num_buffers = command.num_operands;
    step.barrier = command.barrier;
    step.family = command.family;
    step.streams = WeightPartsOf(artifact, command) != 0;
    for (uint32_t o = 0; o < command.num_operands; ++o) {
      step.buffers[o] = Address(artifact.operands()[command.first_operand + o]);
    }
    steps.push_back(step);
  }
  steps.back().barrier = 0;  // the team meets at the end of a job anyway
  steps_[graph] = std::move(steps);
  Step *const begin = steps_[graph].data(), *const end = begin + steps_[graph].size();
  graphs_[graph] = {begin, std::find_if(begin, end, [this](const Step& step) { return TakesResults(step); }), end, 0};
  Deal(graph, num_threads);
}

// Distributes tasks. Any thread may lose its CPU, or half of its core, at any time: others then take over the tasks
// that it has not begun. The weight read next is set at the start of a graph and behind each step that streams one.
void CpuProgram::Deal(uint32_t graph, uint32_t num_threads) {
  const Artifact& artifact = *artifact_;
  StepRange& range = graphs_[graph];
  range.num_threads = num_threads;
  const CommandRecord* commands = &artifact.commands()[artifact.graphs()[graph].first_command];
  StreamedWeight next;
  for (std::size_t c = static_cast<std::size_t>(range.end - range.begin); c-- > 0;) {
    Step& step = range.begin[c];
    // Equal numbers for all threads: they share memory bandwidth evenly.
    step.tasks_each = 1;
    if (num_threads > 1 && step.collective == nullptr) {
      const uint32_t most = LaunchOf(artifact.kernels()[commands[step.command].kernel]).max_tasks / num_threads;
      const bool unequal = !step.streams && artifact.graphs()[graph].max_tokens >= kManyRows;
      step.tasks_each = std::clamp(most, 1u, unequal ? kUnequalTasksOfThread : kTasksOfThread);
    }
    step.num_tasks = step.tasks_each * num_threads;
    step.looks_ahead = c == 0 || step.streams;
    step.next = next;
    if (step.streams) next = Streamed(commands[step.command], step);
  }
}

// The first weight of a step that streams one; empty if its panels are not equal parts of it.
StreamedWeight CpuProgram::Streamed(const CommandRecord& command, const Step& step) const {
  const Artifact& artifact = *artifact_;
  const uint32_t parts = WeightPartsOf(artifact, command);
  if (parts == 0) return {};
  for (uint32_t o = 0; o < command.num_operands; ++o) {
    const OperandRecord& operand = artifact.operands()[command.first_operand + o];
    if (static_cast<OperandKind>(operand.kind) != OperandKind::kWeight) continue;
    const WeightRecord& weight = artifact.weights()[operand.index];
    const uint64_t panels = weight.rank == 0 ? 0 : static_cast<uint64_t>(weight.shape[0]);
    if (operand.bytes != weight.bytes || panels == 0 || panels % parts != 0 || weight.bytes % panels != 0) return {};
    return {static_cast<const char*>(step.buffers[o]), weight.bytes / panels, panels / parts, parts, step.num_tasks};
  }
  return {};
}

void CpuProgram::ResolveWeights(const WeightMemory& weights) {
  const Artifact& artifact = *artifact_;
  weights_ = &weights;
  for (uint32_t g = 0; g < graphs_.size(); ++g) {
    if (graphs_[g].begin == nullptr) continue;
    const GraphRecord& graph = artifact.graphs()[g];
    for (Step* step = graphs_[g].begin; step != graphs_[g].end; ++step) {
      const OperandRecord* operands =
          &artifact.operands()[artifact.commands()[graph.first_command + step->command].first_operand];
      for (uint32_t o = 0; o < step->num_buffers; ++o) {
        if (static_cast<OperandKind>(operands[o].kind) == OperandKind::kWeight) {
          step->buffers[o] = weights.address(operands[o].index) + operands[o].offset;
        }
      }
    }
    Deal(g, graphs_[g].num_threads);
  }
}

void CpuProgram::TouchArena(uint32_t graph) { TouchArenaBytes(artifact_->graphs()[graph].arena_bytes); }

void CpuProgram::TouchArenaBytes(uint64_t bytes) {
  TouchPages(arena_.pages->data() + arena_.touched_bytes, arena_.pages->data() + bytes);
  arena_.touched_bytes = std::max(arena_.touched_bytes, bytes);
}

void CpuProgram::TouchOwn() {
  code_->Touch();
  TouchPages(io_.data(), io_.data() + io_.size());
}

}  // namespace llmc
