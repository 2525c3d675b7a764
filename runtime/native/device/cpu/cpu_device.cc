#include "device/cpu/cpu_device.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "core/ticks.h"

namespace llmc {
namespace {

constexpr uint32_t kTasksOfThread = 4;  // at most: every share of many rows widens them anew
constexpr uint32_t kWorkedFor = 8;  // threads at most whose tasks a thread takes, itself first
constexpr uint64_t kReplaysBeforeMove = 16;

// Of a thread, to be read ahead: less than what a cache still holds when it is used.
uint64_t MostAheadBytes() {
#ifdef _SC_LEVEL2_CACHE_SIZE
  const long l2 = ::sysconf(_SC_LEVEL2_CACHE_SIZE);
  if (l2 > 0) return static_cast<uint64_t>(l2) / 4;
#endif
  return uint64_t{64} << 10;
}

using I64 = const int64_t*;
using P = void*;

// The kernel ABI of FORMAT.md: buffers one by one, then scalars, task, num_tasks.
inline void Call(void* f, void* const* b, I64 s, int32_t t, int32_t n, uint32_t num_buffers) {
#define LLMC_CALL(count, types, args)                                 \
  case count:                                                         \
    reinterpret_cast<void (*) types>(f) args;                         \
    return;
#define LLMC_T(...) (__VA_ARGS__, I64, int32_t, int32_t)
#define LLMC_A(...) (__VA_ARGS__, s, t, n)
  switch (num_buffers) {
    LLMC_CALL(1, LLMC_T(P), LLMC_A(b[0]))
    LLMC_CALL(2, LLMC_T(P, P), LLMC_A(b[0], b[1]))
    LLMC_CALL(3, LLMC_T(P, P, P), LLMC_A(b[0], b[1], b[2]))
    LLMC_CALL(4, LLMC_T(P, P, P, P), LLMC_A(b[0], b[1], b[2], b[3]))
    LLMC_CALL(5, LLMC_T(P, P, P, P, P), LLMC_A(b[0], b[1], b[2], b[3], b[4]))
    LLMC_CALL(6, LLMC_T(P, P, P, P, P, P), LLMC_A(b[0], b[1], b[2], b[3], b[4], b[5]))
    LLMC_CALL(7, LLMC_T(P, P, P, P, P, P, P), LLMC_A(b[0], b[1], b[2], b[3], b[4], b[5], b[6]))
    LLMC_CALL(8, LLMC_T(P, P, P, P, P, P, P, P), LLMC_A(b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]))
    LLMC_CALL(9, LLMC_T(P, P, P, P, P, P, P, P, P), LLMC_A(b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8]))
    LLMC_CALL(10, LLMC_T(P, P, P, P, P, P, P, P, P, P),
              LLMC_A(b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9]))
    LLMC_CALL(11, LLMC_T(P, P, P, P, P, P, P, P, P, P, P),
              LLMC_A(b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10]))
    LLMC_CALL(12, LLMC_T(P, P, P, P, P, P, P, P, P, P, P, P),
              LLMC_A(b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11]))
    default: return;  // the artifact was validated: 1 … 12
  }
#undef LLMC_A
#undef LLMC_T
#undef LLMC_CALL
}

}  // namespace

Status CpuDevice::Create(std::shared_ptr<const Artifact> artifact, const CpuDeviceOptions& options,
                         std::unique_ptr<CpuDevice>* out) {
  const uint32_t num_blocks = options.num_blocks;
  // Slots are int32, and block 0 is the dummy block.
  const uint32_t max_blocks = static_cast<uint32_t>(INT32_MAX / artifact->model().block_size);
  if (num_blocks < 2 || num_blocks > max_blocks) {
    return Status::Error(LLMC_ERR_INVALID_ARGUMENT, "num_blocks with the dummy block is " +
                                                        std::to_string(num_blocks) + ", outside 2 … " +
                                                        std::to_string(max_blocks) + "; choose another pool size");
  }
  // Before anything large is taken or copied: what this CPU cannot run is refused at once.
  std::shared_ptr<const CpuCode> code;
  LLMC_RETURN_IF_ERROR(CpuCode::Load(*artifact, &code));
  std::unique_ptr<CpuDevice> device(new CpuDevice);
  device->shape_ = artifact->shape();
  device->most_ahead_bytes_ = MostAheadBytes();
  device->num_blocks_ = num_blocks;
  LLMC_RETURN_IF_ERROR(device->AllocatePool(*artifact));
  TeamOptions team;
  team.num_threads = options.num_threads;
  team.pin = options.pin;
  team.idle_spin_us = options.idle_spin_us;
  team.adapt = options.adapt;
  team.clock = options.clock;
  LLMC_RETURN_IF_ERROR(Team::Create(team, &device->team_));
  // A thread alone has what it touches first near by.
  if (device->team_->num_threads() > 1) device->spread_ = NodeSpread(device->team_->cpus(), options.nodes);
  device->spread_pool_bytes_ = device->spread_.Place(device->kv_pool_);
  // Pool and arena are taken from the system as they are used, most of them later.
  device->weights_ = WeightMemory(artifact, options.weights, device->kv_pool_.size() + artifact->max_arena_bytes());
  if (options.weights.mode == WeightMode::kCopied) {
    while (!device->weights_.settled()) LLMC_RETURN_IF_ERROR(device->weights_.Move(device->team_.get(), &device->spread_));
  }
  LLMC_RETURN_IF_ERROR(device->MakeProgram(std::move(artifact), std::move(code), &device->program_));
  device->PlaceArena(&device->program_);
  *out = std::move(device);
  return Status::Ok();
}

// Everything that may fail or throw comes before the first change.
Status CpuDevice::AddGraphs(std::shared_ptr<const Artifact> artifact) {
  LLMC_RETURN_IF_ERROR(artifact->CheckExtends(*program_.artifact));
  std::vector<GraphShape> graphs = artifact->shape().graphs;
  std::shared_ptr<const CpuCode> code;
  LLMC_RETURN_IF_ERROR(CpuCode::Load(*artifact, &code));
  Program program;
  LLMC_RETURN_IF_ERROR(MakeProgram(std::move(artifact), std::move(code), &program));
  PlaceArena(&program);
  program_ = std::move(program);
  shape_.graphs = std::move(graphs);
  return Status::Ok();
}

// Until a device has replayed a few graphs it may belong to a process that ends soon, which a copy would only delay.
Status CpuDevice::BeforeStep() {
  if (weights_.settled() || stats_.num_replays < kReplaysBeforeMove) return Status::Ok();
  LLMC_RETURN_IF_ERROR(weights_.Move(team_.get(), &spread_));
  ResolveWeights();
  return Status::Ok();
}

Status CpuDevice::AllocatePool(const Artifact& artifact) {
  uint64_t value_pool_bytes = 0, kv_bytes = 0;
  if (__builtin_mul_overflow(artifact.key_block_bytes(), uint64_t{num_blocks_}, &key_pool_bytes_) ||
      __builtin_mul_overflow(artifact.value_block_bytes(), uint64_t{num_blocks_}, &value_pool_bytes) ||
      key_pool_bytes_ > (1ull << 60) || value_pool_bytes > (1ull << 60)) {
    return Status::Error(LLMC_ERR_OUT_OF_MEMORY, "a KV pool of " + std::to_string(num_blocks_) +
                                                     " blocks overflows 64 bits; ask for fewer blocks");
  }
  key_pool_bytes_ = RoundUp(key_pool_bytes_, kAlignment);
  layer_pool_bytes_ = key_pool_bytes_ + RoundUp(value_pool_bytes, kAlignment);
  if (__builtin_mul_overflow(layer_pool_bytes_, uint64_t(artifact.model().num_layers), &kv_bytes)) kv_bytes = UINT64_MAX;
  return Pages::Allocate(kv_bytes, "KV pool", &kv_pool_);
}

Status CpuDevice::MakeProgram(std::shared_ptr<const Artifact> of, std::shared_ptr<const CpuCode> code,
                              Program* out) const {
  const Artifact& artifact = *of;
  out->artifact = std::move(of);
  out->code = std::move(code);
  LLMC_RETURN_IF_ERROR(Pages::Allocate(artifact.max_arena_bytes(), "arena", &out->arena));

  // One region for inputs and logits, each sized for the largest graph.
  uint64_t offsets[kNumInputs + 1] = {}, bytes = 0, max_samples = 0;
  for (uint32_t i = 0; i < kNumInputs; ++i) {
    uint64_t largest = 0;
    for (const GraphRecord& graph : artifact.graphs()) largest = std::max(largest, InputBytes(graph, i));
    offsets[i] = bytes;
    bytes += largest;
  }
  for (const GraphRecord& graph : artifact.graphs()) max_samples = std::max<uint64_t>(max_samples, graph.max_samples);
  offsets[kNumInputs] = bytes;
  bytes += RoundUp(max_samples * uint64_t(artifact.model().vocab_size) * sizeof(float), kAlignment);
  LLMC_RETURN_IF_ERROR(Pages::Allocate(bytes, "inputs and logits", &out->io));
  for (uint32_t i = 0; i < kNumInputs; ++i) out->inputs[i] = reinterpret_cast<int32_t*>(out->io.data() + offsets[i]);
  out->logits = reinterpret_cast<float*>(out->io.data() + offsets[kNumInputs]);
  Resolve(out);
  return Status::Ok();
}

// What one thread writes others read, and Reserve has one thread touch all.
void CpuDevice::PlaceArena(Program* program) { program->spread_bytes = spread_.Place(program->arena); }

MemorySpread CpuDevice::memory_spread() const {
  return {spread_pool_bytes_ + program_.spread_bytes + weights_.spread_bytes(), spread_.num_nodes(), spread_.error()};
}

TeamUse CpuDevice::team_use() const {
  const TeamStats stats = team_->Stats();
  return {stats.size, stats.cuts};
}

void* CpuDevice::OperandAddress(const Program& program, const OperandRecord& operand) const {
  switch (static_cast<OperandKind>(operand.kind)) {
    case OperandKind::kArena: return program.arena.data() + operand.offset;
    case OperandKind::kWeight: return weights_.address(operand.index) + operand.offset;
    case OperandKind::kInput: return reinterpret_cast<char*>(program.inputs[operand.index]) + operand.offset;
    case OperandKind::kKeyPool: return kv_pool_.data() + operand.index * layer_pool_bytes_;
    case OperandKind::kValuePool: return kv_pool_.data() + operand.index * layer_pool_bytes_ + key_pool_bytes_;
    case OperandKind::kOutput: return reinterpret_cast<char*>(program.logits) + operand.offset;
  }
  return nullptr;
}

void CpuDevice::Resolve(Program* program) const {
  const Artifact& artifact = *program->artifact;
  constexpr std::size_t kClaimsLine = kGateLine / sizeof(uint32_t);
  std::size_t total = 0;
  for (const GraphRecord& graph : artifact.graphs()) {
    total += graph.num_commands;
    program->longest = std::max<std::size_t>(program->longest, graph.num_commands);
  }
  program->claims_of_thread = RoundUp(program->longest, kClaimsLine) + kClaimsLine;  // a line apart
  program->claimed = std::vector<std::atomic<uint32_t>>(2 * num_threads() * program->claims_of_thread);
  program->steps.reserve(total);  // ranges below point into it
  for (const GraphRecord& graph : artifact.graphs()) {
    Step* begin = program->steps.data() + program->steps.size();
    for (uint32_t c = 0; c < graph.num_commands; ++c) {
      const CommandRecord& command = artifact.commands()[graph.first_command + c];
      Step step{program->code->function(command.kernel), {}, command.num_operands, command.barrier, command.family,
                0, 0, LaunchOf(artifact.kernels()[command.kernel]).weight_parts != 0, false, {}};
      for (uint32_t o = 0; o < command.num_operands; ++o) {
        step.buffers[o] = OperandAddress(*program, artifact.operands()[command.first_operand + o]);
      }
      program->steps.push_back(step);
    }
    program->steps.back().barrier = 0;  // the team meets at the end of a job anyway
    program->graphs.push_back({begin, program->steps.data() + program->steps.size(), 0});
    Deal(program, static_cast<uint32_t>(program->graphs.size()) - 1, num_threads());
  }
}

// Between two replays. Any thread may lose its CPU, or half of its core, at any time: then the others take over what it
// has not begun. What is read next is known at the start of a graph, and anew whenever a step has streamed its weight.
void CpuDevice::Deal(Program* program, uint32_t graph, uint32_t num_threads) const {
  const Artifact& artifact = *program->artifact;
  StepRange& range = program->graphs[graph];
  range.num_threads = num_threads;
  const CommandRecord* commands = &artifact.commands()[artifact.graphs()[graph].first_command];
  StreamedWeight next;
  for (std::size_t c = static_cast<std::size_t>(range.end - range.begin); c-- > 0;) {
    Step& step = range.begin[c];
    // As many for each thread: memory is shared evenly.
    const uint32_t most = LaunchOf(artifact.kernels()[commands[c].kernel]).max_tasks / num_threads;
    step.tasks_each = num_threads == 1 ? 1 : std::clamp(most, 1u, kTasksOfThread);
    step.num_tasks = step.tasks_each * num_threads;
    step.looks_ahead = c == 0 || step.streams;
    step.next = next;
    if (step.streams) next = Streamed(artifact, commands[c], step);
  }
}

// The first weight of a step that streams one; nothing where its panels are no equal parts of it.
CpuDevice::StreamedWeight CpuDevice::Streamed(const Artifact& artifact, const CommandRecord& command, const Step& step) {
  const uint32_t parts = LaunchOf(artifact.kernels()[command.kernel]).weight_parts;
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

// Between two replays.
void CpuDevice::ResolveWeights() {
  const Artifact& artifact = *program_.artifact;
  Step* step = program_.steps.data();
  for (uint32_t g = 0; g < program_.graphs.size(); ++g) {
    const GraphRecord& graph = artifact.graphs()[g];
    for (uint32_t c = 0; c < graph.num_commands; ++c, ++step) {
      const OperandRecord* operands = &artifact.operands()[artifact.commands()[graph.first_command + c].first_operand];
      for (uint32_t o = 0; o < step->num_buffers; ++o) {
        if (static_cast<OperandKind>(operands[o].kind) == OperandKind::kWeight) {
          step->buffers[o] = OperandAddress(program_, operands[o]);
        }
      }
    }
    Deal(&program_, g, program_.graphs[g].num_threads);
  }
}

void CpuDevice::CopyInputs(const BatchView& b) {
  const GraphRecord& graph = program_.artifact->graphs()[b.graph];
  const auto copy = [this](Input input, const int32_t* from, uint64_t count) {
    if (count) std::memcpy(program_.inputs[input], from, count * sizeof(int32_t));
  };
  copy(kInputIds, b.input_ids, b.num_tokens);
  copy(kPositions, b.positions, b.num_tokens);
  copy(kSlotMapping, b.slot_mapping, b.num_tokens);
  copy(kContextLens, b.context_lens, b.num_seqs);
  copy(kQueryStart, b.query_start, uint64_t{b.num_seqs} + 1);
  copy(kSampleIndex, b.sample_index, b.num_samples);
  // Rows wider than the graph's are cut; Check made sure that only unused entries are lost.
  const uint64_t stride = std::min(b.block_table_stride, graph.max_blocks_per_seq);
  for (uint64_t i = 0; i < b.num_seqs; ++i) {
    std::memcpy(program_.inputs[kBlockTables] + i * stride, b.block_tables + i * b.block_table_stride,
                stride * sizeof(int32_t));
    std::fill(program_.inputs[kTokenSeq] + b.query_start[i], program_.inputs[kTokenSeq] + b.query_start[i + 1],
              static_cast<int32_t>(i));
  }
  scalars_[0] = b.num_tokens;
  scalars_[1] = b.num_seqs;
  scalars_[2] = b.num_samples;
  scalars_[3] = static_cast<int64_t>(stride);
  scalars_[4] = num_blocks_;
  scalars_[5] = team_->size();
}

// A thread's first tasks of the weight that it reads next, as far as rows are one chunk.
inline void CpuDevice::LookAhead(const Step& step, uint32_t thread, uint32_t num_threads, ReadAhead* ahead) const {
  const StreamedWeight& next = step.next;
  *ahead = {};
  if (next.parts == 0) return;
  const uint32_t each = next.num_tasks / num_threads;
  const auto panel_of = [&next](uint64_t task) { return next.panels * task / next.num_tasks; };
  const uint64_t first = panel_of(uint64_t{each} * thread), last = panel_of(uint64_t{each} * (thread + 1));
  const char* at = next.data + first * next.panel_bytes;
  const uint64_t bytes = std::min((last - first) * next.panel_bytes, most_ahead_bytes_ / next.parts);
  *ahead = {at, at + bytes, next.parts > 1 ? next.panels * next.panel_bytes : 0};
}

std::atomic<uint32_t>* CpuDevice::Claims(uint32_t turn, uint32_t thread) {
  return program_.claimed.data() + (std::size_t{turn} * num_threads() + thread) * program_.claims_of_thread;
}

// Own tasks first, then those that threads behind this one have not begun. Those of a thread that streams a weight are
// neighbours: it goes on reading where it was. Others may be of unequal size, and are dealt out.
inline void CpuDevice::Compute(const Step& step, std::size_t index, uint32_t thread, uint32_t num_threads,
                               ReadAhead* ahead) {
  const auto run = [&](uint32_t task) {
    Call(step.function, step.buffers, scalars_, static_cast<int32_t>(task), static_cast<int32_t>(step.num_tasks),
         step.num_buffers);
  };
  if (step.tasks_each == 1) {
    run(thread);
  } else {
    for (uint32_t i = 0; i < std::min(num_threads, kWorkedFor); ++i) {
      const uint32_t of = thread + i < num_threads ? thread + i : thread + i - num_threads;
      std::atomic<uint32_t>& claimed = Claims(turn_, of)[index];
      while (claimed.load(std::memory_order_relaxed) < step.tasks_each) {
        const uint32_t k = claimed.fetch_add(1, std::memory_order_relaxed);
        if (k < step.tasks_each) run(step.streams ? of * step.tasks_each + k : of + k * num_threads);
      }
    }
  }
  if (step.looks_ahead) LookAhead(step, thread, num_threads, ahead);
}

void CpuDevice::ResetClaims(uint32_t turn, uint32_t thread) {
  std::atomic<uint32_t>* claims = Claims(turn, thread);
  for (std::size_t i = 0; i < program_.longest; ++i) claims[i].store(0, std::memory_order_relaxed);
}

void CpuDevice::WalkThread(uint32_t thread, uint32_t num_threads) {
  ReadAhead ahead;
  ResetClaims(1 - turn_, thread);  // for the next replay: no thread looks at these during this one
  for (const Step* step = current_.begin; step != current_.end; ++step) {
    Compute(*step, static_cast<std::size_t>(step - current_.begin), thread, num_threads, &ahead);
    if (step->barrier) team_->Barrier(thread, &ahead);
  }
}

// As WalkThread, on thread 0 and, while profiling, on every thread.
void CpuDevice::WalkTimed(uint32_t thread, uint32_t num_threads) {
  ReadAhead ahead;
  ResetClaims(1 - turn_, thread);  // for the next replay: no thread looks at these during this one
  CommandTime* times = profile_.empty() ? nullptr : profile_.data() + thread * profile_stride_;
  auto ticks = ticks_;
  for (const Step* from = current_.begin; from != current_.end; ++from) {
    const Step step = *from;  // before the clock is read: fetching a command is overhead
    const uint64_t start = Ticks();
    Compute(step, static_cast<std::size_t>(from - current_.begin), thread, num_threads, &ahead);
    const uint64_t end = Ticks();
    uint64_t leave = end;
    if (step.barrier) {
      team_->Barrier(thread, &ahead);
      leave = Ticks();
    }
    ticks.family[step.family] += end - start;
    ticks.barrier += leave - end;
    ticks.done = leave;
    if (times) *times++ = {start, end, leave};
  }
  if (thread == 0) ticks_ = ticks;
}

Status CpuDevice::Replay(const BatchView& batch, const float** logits) {
  const uint64_t start_ns = MonotonicNs(), start = Ticks();
  LLMC_RETURN_IF_ERROR(CheckBatch(shape_, num_blocks_, batch));
  CopyInputs(batch);
  RunTeam(batch.graph);
  const uint64_t end = Ticks();
  Account(start, end, MonotonicNs() - start_ns);
  *logits = program_.logits;
  return Status::Ok();
}

// The inputs and scalars are those of the step.
void CpuDevice::RunTeam(uint32_t graph) {
  const uint32_t size = team_->size();
  if (program_.graphs[graph].num_threads != size) Deal(&program_, graph, size);
  current_ = program_.graphs[graph];
  ticks_ = {};
  turn_ = 1 - turn_;
  // Threads that were left out of the last replay have reset nothing for this one.
  for (; last_size_ < size; ++last_size_) ResetClaims(turn_, last_size_);
  last_size_ = size;
  team_->Run(
      [](void* self, uint32_t thread, uint32_t num_threads) {
        CpuDevice& device = *static_cast<CpuDevice*>(self);
        if (thread == 0 || !device.profile_.empty()) {
          device.WalkTimed(thread, num_threads);
        } else {
          device.WalkThread(thread, num_threads);
        }
      },
      this);
}

void CpuDevice::Visit(uint32_t graph) {
  std::fill(std::begin(scalars_), std::end(scalars_), 0);
  RunTeam(graph);
}

// The clock's nanoseconds of this replay say what its ticks are worth. Everything is rounded down, so parts never
// exceed the whole.
void CpuDevice::Account(uint64_t start, uint64_t end, uint64_t ns) {
  ns_per_tick_ = end > start ? static_cast<double>(ns) / static_cast<double>(end - start) : 0;
  const auto to_ns = [this](uint64_t ticks) { return static_cast<uint64_t>(static_cast<double>(ticks) * ns_per_tick_); };
  last_ = {};
  for (uint32_t family = 0; family < kNumFamilies; ++family) {
    const uint64_t family_ns = to_ns(ticks_.family[family]);
    stats_.family_ns[family] += family_ns;
    last_.kernel_ns += family_ns;
  }
  // The team meets at the end of the job, after the last command.
  last_.barrier_ns = to_ns(ticks_.barrier + (end - ticks_.done));
  stats_.num_replays += 1;
  stats_.total_ns += ns;
  stats_.kernel_ns += last_.kernel_ns;
  stats_.barrier_ns += last_.barrier_ns;
  num_profiled_ = profile_.empty() ? 0 : static_cast<uint32_t>(current_.end - current_.begin);
  profile_start_ = start;
}

void CpuDevice::SetProfiling(bool on) {
  std::size_t longest = 0;
  for (const StepRange& graph : program_.graphs) {
    longest = std::max(longest, static_cast<std::size_t>(graph.end - graph.begin));
  }
  // Threads write side by side: keep them a line apart.
  profile_stride_ = longest + 128 / sizeof(CommandTime) + 1;
  profile_ = std::vector<CommandTime>(on ? profile_stride_ * num_threads() : 0);
  num_profiled_ = 0;
}

CommandTime CpuDevice::Profiled(uint32_t thread, uint32_t index) const {
  const CommandTime& ticks = profile_[thread * profile_stride_ + index];
  const auto to_ns = [this](uint64_t at) {
    return at > profile_start_ ? static_cast<uint64_t>(static_cast<double>(at - profile_start_) * ns_per_tick_) : 0;
  };
  return {to_ns(ticks.start), to_ns(ticks.end), to_ns(ticks.leave)};
}

Status CpuDevice::Enqueue(const StepBatch& b, Fence* fence) {
  LLMC_RETURN_IF_ERROR(CheckSizes(b));
  *fence = 0;
  const float* logits = nullptr;
  return Replay({b.graph, b.num_tokens, b.num_seqs, b.num_samples, b.block_table_stride, b.input_ids.data(),
                 b.positions.data(), b.slot_mapping.data(), b.block_tables.data(), b.context_lens.data(),
                 b.query_start.data(), b.sample_index.data()},
                &logits);
}

Status CpuDevice::Wait(Fence, const float** logits) {
  *logits = program_.logits;
  return Status::Ok();
}

void CpuDevice::GetStats(std::vector<DeviceStat>* out) const {
  const TeamUse use = team_use();
  const MemorySpread spread = memory_spread();
  *out = {{"threads", num_threads()},
          {"working_threads", use.size},
          {"thread_cuts", use.cuts},
          {"weight_bytes", weight_bytes()},
          {"copied_weight_bytes", copied_weight_bytes()},
          {"spread_bytes", spread.bytes},
          {"memory_nodes", spread.num_nodes},
          {"spread_errno", static_cast<uint64_t>(spread.error)}};
}

void CpuDevice::Reserve(const StepBatch& batch) {
  const auto touch = [](char* from, const char* to) {
    constexpr uint64_t kPageBytes = 4096;
    for (; from < to; from += kPageBytes) {
      volatile char* byte = from;
      *byte = *byte;
    }
  };
  const uint64_t arena_bytes = program_.artifact->graphs()[batch.graph].arena_bytes;
  touch(program_.arena.data() + program_.touched_arena_bytes, program_.arena.data() + arena_bytes);
  program_.touched_arena_bytes = std::max(program_.touched_arena_bytes, arena_bytes);
  uint64_t num_blocks = 0;
  for (const int32_t block : batch.block_tables) num_blocks = std::max(num_blocks, static_cast<uint64_t>(block) + 1);
  const uint64_t key = program_.artifact->key_block_bytes(), value = program_.artifact->value_block_bytes();
  for (int32_t layer = 0; layer < program_.artifact->model().num_layers; ++layer) {
    char* keys = kv_pool_.data() + static_cast<uint64_t>(layer) * layer_pool_bytes_;
    touch(keys + touched_blocks_ * key, keys + num_blocks * key);
    char* values = keys + key_pool_bytes_;
    touch(values + touched_blocks_ * value, values + num_blocks * value);
  }
  touched_blocks_ = std::max(touched_blocks_, num_blocks);
}

void CpuDevice::ForEach(uint32_t count, uint32_t num_workers, Job job, void* context) {
  if (std::min({count, num_workers, num_threads()}) < 2) return Device::ForEach(count, num_workers, job, context);
  struct Shared {
    uint32_t count, num_workers;
    Job job;
    void* context;
    std::atomic<uint32_t> next{0};
  } shared{count, num_workers, job, context, {}};
  team_->Run(
      [](void* of, uint32_t thread, uint32_t) {
        Shared& all = *static_cast<Shared*>(of);
        if (thread >= all.num_workers) return;
        for (uint32_t i; (i = all.next.fetch_add(1, std::memory_order_relaxed)) < all.count;) all.job(all.context, i, thread);
      },
      &shared);
}

Status CpuDevice::CopyBlock(uint32_t from, uint32_t to) {
  if (from >= num_blocks_ || to >= num_blocks_) {
    return Status::Error(LLMC_ERR_OUT_OF_RANGE, "cannot copy KV block " + std::to_string(from) + " to " +
                                                    std::to_string(to) + "; the pool has " +
                                                    std::to_string(num_blocks_) + " blocks");
  }
  if (from == to) return Status::Ok();
  const uint64_t key = program_.artifact->key_block_bytes(), value = program_.artifact->value_block_bytes();
  for (int32_t layer = 0; layer < program_.artifact->model().num_layers; ++layer) {
    char* keys = kv_pool_.data() + static_cast<uint64_t>(layer) * layer_pool_bytes_;
    char* values = keys + key_pool_bytes_;
    std::memcpy(keys + to * key, keys + from * key, key);
    std::memcpy(values + to * value, values + from * value, value);
  }
  return Status::Ok();
}

}  // namespace llmc
