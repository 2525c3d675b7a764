#include "device/cpu/cpu_replay.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>
#include <utility>

#include "core/clock.h"
#include "core/ticks.h"
#include "device/cpu/kernel_call.h"

namespace llmc {
namespace {

constexpr uint32_t kWorkedFor = 8;  // most threads whose tasks a thread takes, itself first

// Most bytes that a thread reads ahead: few enough to be still in L2 when they are used.
uint64_t MostAheadBytes() {
#ifdef _SC_LEVEL2_CACHE_SIZE
  const long l2 = ::sysconf(_SC_LEVEL2_CACHE_SIZE);
  if (l2 > 0) return static_cast<uint64_t>(l2) / 4;
#endif
  return uint64_t{64} << 10;
}

}  // namespace

CpuReplay::CpuReplay(Team* team, const PoolCounts& pool, bool eager, std::shared_ptr<Collective> collective,
                     uint32_t most_started)
    : team_(team),
      pool_(pool),
      eager_(eager),
      most_ahead_bytes_(MostAheadBytes()),
      collective_(std::move(collective)),
      most_started_(most_started),
      times_(team->num_threads()) {}

void CpuReplay::CutSteps(uint32_t least_rows, CpuProgram second) {
  least_cut_rows_ = least_rows;
  second_ = std::make_unique<CpuProgram>(std::move(second));
  claims_ = Claims(team_->num_threads(), 2 * program_.longest());
}

void CpuReplay::Adopt(CpuProgram* program) {
  claims_ = Claims(team_->num_threads(), program->longest());
  times_.set_longest(program->longest());
  passed_bytes_ = program->artifact().passed_bytes();
  std::swap(program_, *program);
}

void CpuReplay::CopyInputs(const BatchView& b, CpuProgram* program, StepRows* rows) {
  const auto copy = [program](Input input, const int32_t* from, uint64_t count) {
    if (count) std::memcpy(program->input(input), from, count * sizeof(int32_t));
  };
  copy(kInputIds, b.input_ids, b.num_tokens);
  copy(kPositions, b.positions, b.num_tokens);
  copy(kSlotMapping, b.slot_mapping, b.num_tokens);
  copy(kContextLens, b.context_lens, b.num_seqs);
  copy(kQueryStart, b.query_start, uint64_t{b.num_seqs} + 1);
  copy(kSampleIndex, b.sample_index, b.num_samples);
  if (b.state_slots != nullptr) copy(kStateSlots, b.state_slots, uint64_t{b.num_seqs} * kStateFields);
  if (program->artifact().shape().rope_axes > 0) FillRopePositions(b, program->input(kRopePositions));
  const uint32_t stride =
      FillBlockTables(program->artifact().shape(), b, program->input(kBlockTables), program->input(kTokenSeq));
  if (!program->artifact().adapters().empty()) tiler_.Write(b, program->input(kAdapterTiles));
  rows->tokens = b.num_tokens;
  rows->samples = b.num_samples;
  rows->scalars[0] = b.num_tokens;
  rows->scalars[1] = b.num_seqs;
  rows->scalars[2] = b.num_samples;
  rows->scalars[3] = stride;
  rows->scalars[4] = pool_.blocks;
  rows->scalars[5] = team_->size();
}

// Sets the range to read ahead: the first panels that the thread reads of the next weight, if its rows are one chunk.
inline void CpuReplay::LookAhead(const Step& step, uint32_t thread, uint32_t num_threads, ReadAhead* ahead) const {
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

// Rows are those of the step, equal on all ranks, not those that the graph has room for. With no rows no rank waits.
Reduction CpuReplay::ReductionOf(const Step& step, const StepRows& of) {
  const CollectiveRecord& record = *step.collective;
  void* const* operand = step.buffers;
  const auto next = [&operand] { return static_cast<const float*>(*operand++); };
  const float* in = next();
  const float* bias = (record.adds & kAddsBias) != 0 ? next() : nullptr;
  const float* residual = (record.adds & kAddsResidual) != 0 ? next() : nullptr;
  return {in, static_cast<float*>(*operand), bias, residual, of.Of(record), record.width};
}

void CpuReplay::RunCollective(const Step& step, const StepRows& of, uint32_t thread, uint32_t num_threads) const {
  const CollectiveRecord& record = *step.collective;
  const uint64_t rows = of.Of(record);
  void* const* operand = step.buffers;
  if (record.op == static_cast<uint32_t>(CollectiveOp::kPassOn)) {
    collective_->PassOn({static_cast<float*>(*operand), rows * record.width, record.stage, outbox_ + step.place},
                        thread, num_threads);
    return;
  }
  if (record.op == static_cast<uint32_t>(CollectiveOp::kAllGather)) {
    const auto* in = static_cast<const float*>(operand[0]);
    collective_->AllGather({in, static_cast<float*>(operand[1]), rows, record.width}, thread, num_threads);
    return;
  }
  collective_->AllReduce(ReductionOf(step, of), thread, num_threads);
}

// Runs own tasks first, then those that the threads behind this one have not begun. If a step streams a weight, a
// thread's tasks are neighbours: it reads on where it was. Tasks of other steps may be of unequal size and are dealt
// out.
template <bool kTends>
inline void CpuReplay::Compute(const Step& step, const StepRows& rows, std::size_t index, uint32_t thread,
                               uint32_t num_threads) {
  const auto run = [&](uint32_t task) {
    CallKernel(step.function, step.buffers, rows.scalars, static_cast<int32_t>(task),
               static_cast<int32_t>(step.num_tasks), step.num_buffers);
    if (kTends) collective_->Tend();
  };
  if (step.collective != nullptr) {
    RunCollective(step, rows, thread, num_threads);
  } else if (step.tasks_each == 1) {
    run(thread);
  } else {
    for (uint32_t i = 0; i < std::min(num_threads, kWorkedFor); ++i) {
      const uint32_t of = thread + i < num_threads ? thread + i : thread + i - num_threads;
      std::atomic<uint32_t>& claimed = claims_.Of(turn_, of)[index];
      while (claimed.load(std::memory_order_relaxed) < step.tasks_each) {
        const uint32_t k = claimed.fetch_add(1, std::memory_order_relaxed);
        if (k < step.tasks_each) run(step.streams ? of * step.tasks_each + k : of + k * num_threads);
      }
    }
  }
}

void CpuReplay::Walk(uint32_t thread, uint32_t num_threads) {
  ReadAhead ahead;
  claims_.Reset(1 - turn_, thread);  // for the next replay: no thread reads these during this one
  for (const Step* step = current_.begin; step != current_.end; ++step) {
    Compute<false>(*step, rows_, static_cast<std::size_t>(step - current_.begin), thread, num_threads);
    if (step->looks_ahead) LookAhead(*step, thread, num_threads, &ahead);
    if (step->barrier) team_->Barrier(thread, &ahead);
  }
}

// As Walk, with times: on thread 0 and, while profiling, on every thread.
void CpuReplay::WalkTimed(uint32_t thread, uint32_t num_threads) {
  ReadAhead ahead;
  claims_.Reset(1 - turn_, thread);  // for the next replay: no thread reads these during this one
  CommandTime* times = times_.Commands(thread);
  auto spent = thread == 0 ? spent_ : ReplayTimes::Spent{};  // thread 0 alone counts it, and writes it back
  for (const Step* from = current_.begin; from != current_.end; ++from) {
    const Step step = *from;  // before the clock is read: fetching a command is overhead
    const uint64_t start = Ticks();
    Compute<false>(step, rows_, static_cast<std::size_t>(from - current_.begin), thread, num_threads);
    if (step.looks_ahead) LookAhead(step, thread, num_threads, &ahead);
    const uint64_t end = Ticks();
    uint64_t leave = end;
    if (thread == 0 && collective_ != nullptr) collective_->Tend();
    if (step.barrier) {
      team_->Barrier(thread, &ahead);
      leave = Ticks();
    }
    spent.family[step.family] += end - start;
    spent.barrier += leave - end;
    spent.done = leave;
    if (times) times[step.command] = {start, end, leave};
  }
  if (thread == 0) spent_ = spent;
}

Status CpuReplay::Start(const ModelShape& model, const BatchView& batch) {
  const uint64_t start_ns = MonotonicNs(), start = Ticks();
  LLMC_RETURN_IF_ERROR(CheckBatch(model, pool_.blocks, pool_.states, batch));
  if (least_cut_rows_ != 0 && batch.num_tokens >= least_cut_rows_ && CutBatch(batch, batch.num_tokens / 2, &parts_)) {
    RunParts(batch);
    times_.Account(spent_, program_.artifact().graphs()[batch.graph].num_commands, start, Ticks(),
                   MonotonicNs() - start_ns);
    return collective_->status();
  }
  CopyInputs(batch, &program_, &rows_);
  outbox_ = num_steps_++ % most_started_ * passed_bytes_;
  spent_ = {};
  RunTeam(batch.graph, Part::kOwn);
  const CpuProgram::StepRange& range = program_.Dealt(batch.graph, team_->size());
  const uint64_t end = Ticks(), ns = MonotonicNs() - start_ns;
  if (range.results == range.end) {
    times_.Account(spent_, program_.artifact().graphs()[batch.graph].num_commands, start, end, ns);
  } else {
    started_.push_back({batch.graph, rows_.tokens, rows_.samples, outbox_, spent_, start, end, ns});
  }
  return collective_ != nullptr ? collective_->status() : Status::Ok();
}

// What lies between its two parts is no part of a step's time.
Status CpuReplay::Finish() {
  if (started_.empty()) return Status::Ok();
  const Started step = started_.front();
  started_.pop_front();
  const uint64_t begin_ns = MonotonicNs(), begin = Ticks();
  rows_.tokens = step.tokens;
  rows_.samples = step.samples;
  outbox_ = step.outbox;
  spent_ = step.spent;
  RunTeam(step.graph, Part::kResults);
  const uint64_t end = Ticks(), between = begin - step.end;
  times_.Account(spent_, program_.artifact().graphs()[step.graph].num_commands, step.start + between, end,
                 step.ns + MonotonicNs() - begin_ns);
  return collective_->status();
}

Status CpuReplay::Begin(const ModelShape& model, const BatchView& batch) {
  LLMC_RETURN_IF_ERROR(CheckBatch(model, pool_.blocks, pool_.states, batch));
  CopyInputs(batch, &program_, &rows_);
  current_ = program_.Dealt(batch.graph, team_->size());
  return Status::Ok();
}

// A stage has only some of a graph's commands, in their order.
Status CpuReplay::Find(uint32_t command, const Step** out) const {
  *out = std::lower_bound(current_.begin, current_.end, command,
                          [](const Step& step, uint32_t wanted) { return step.command < wanted; });
  if (*out != current_.end && (*out)->command == command) return Status::Ok();
  return Status::Error(LLMC_ERR_OUT_OF_RANGE,
                       "command " + std::to_string(command) + " is run by another stage; choose one of this stage's");
}

// Runs the command as a single task: the number of tasks changes no bit.
Status CpuReplay::RunCommand(uint32_t command) const {
  const Step* step = nullptr;
  LLMC_RETURN_IF_ERROR(Find(command, &step));
  if (step->collective != nullptr) {
    RunCollective(*step, rows_, 0, 1);
  } else {
    CallKernel(step->function, step->buffers, rows_.scalars, 0, 1, step->num_buffers);
  }
  return Status::Ok();
}

Status CpuReplay::ReadOperand(uint32_t command, uint32_t index, uint64_t bytes, void* out) const {
  const Step* step = nullptr;
  LLMC_RETURN_IF_ERROR(Find(command, &step));
  std::memcpy(out, step->buffers[index], bytes);
  return Status::Ok();
}

void CpuReplay::Visit(uint32_t graph) {
  rows_ = {};
  if (!program_.artifact().adapters().empty()) program_.input(kAdapterTiles)[0] = 0;
  RunTeam(graph, Part::kOwn);
}

// Replays a graph up to the results of another stage, or the part that takes these. Inputs and scalars must be set.
// Command by command, the team may have another size at each.
void CpuReplay::RunTeam(uint32_t graph, Part part) {
  const uint32_t size = team_->size();
  const CpuProgram::StepRange whole = program_.Dealt(graph, size);
  Step* const begin = part == Part::kResults ? whole.results : whole.begin;
  Step* const end = part == Part::kResults ? whole.end : whole.results;
  if (!eager_) return RunJob({begin, end, end, size}, size);
  for (Step* step = begin; step != end; ++step) {
    const uint32_t size_now = team_->size();
    program_.Dealt(graph, size_now);
    RunJob({step, step + 1, step + 1, size_now}, size_now);
  }
}

// Call before each job of the team.
void CpuReplay::TakeTurn(uint32_t size) {
  turn_ = 1 - turn_;
  // Threads that were left out of the last replay have not reset their claims for this one.
  for (; last_size_ < size; ++last_size_) claims_.Reset(turn_, last_size_);
  last_size_ = size;
}

void CpuReplay::RunJob(CpuProgram::StepRange steps, uint32_t size) {
  current_ = steps;
  TakeTurn(size);
  team_->Run(
      [](void* self, uint32_t thread, uint32_t num_threads) {
        CpuReplay& replay = *static_cast<CpuReplay*>(self);
        if (thread == 0 || replay.times_.profiling()) {
          replay.WalkTimed(thread, num_threads);
        } else {
          replay.Walk(thread, num_threads);
        }
      },
      this);
}

void CpuReplay::ResolveWeights(const WeightMemory& weights) {
  program_.ResolveWeights(weights);
  if (second_) second_->ResolveWeights(weights);
}

void CpuReplay::Release(uint32_t graph) {
  program_.Release(graph);
  if (second_) second_->Release(graph);
}

void CpuReplay::TouchArena(const StepBatch& batch) {
  program_.TouchArena(batch.graph);
  if (second_ && batch.num_tokens >= least_cut_rows_) second_->TouchArena(batch.graph);
}

// Runs parts_ of a step. The program then holds the logits of both.
void CpuReplay::RunParts(const BatchView& batch) {
  CopyInputs(parts_.first, &program_, &rows_);
  CopyInputs(parts_.second, second_.get(), &second_rows_);
  const uint32_t size = team_->size();
  OrderParts(program_.Dealt(batch.graph, size), second_->Dealt(batch.graph, size), &order_);
  TakeTurn(size);
  team_->Run([](void* self, uint32_t thread,
                uint32_t num_threads) { static_cast<CpuReplay*>(self)->WalkParts(thread, num_threads); },
             this);
  const uint64_t width = program_.artifact().shape().output_width();
  if (second_rows_.samples != 0) {
    std::memcpy(program_.logits() + rows_.samples * width, second_->logits(),
                second_rows_.samples * width * sizeof(float));
  }
  ++num_cut_;
}

inline void CpuReplay::RunPart(const PartStep& one, uint32_t thread, uint32_t num_threads) {
  const Step& step = *one.step;
  const StepRows& rows = one.part == 0 ? rows_ : second_rows_;
  switch (one.what) {
    case PartStep::What::kRun: {
      const std::size_t claim = one.part * program_.longest() + one.index;
      thread == 0 ? Compute<true>(step, rows, claim, thread, num_threads)
                  : Compute<false>(step, rows, claim, thread, num_threads);
      return;
    }
    case PartStep::What::kBegin:
      if (thread == 0 && collective_->overlaps()) collective_->BeginReduce(ReductionOf(step, rows), one.part);
      return;
    case PartStep::What::kFinish:
      if (!collective_->overlaps()) return collective_->AllReduce(ReductionOf(step, rows), thread, num_threads);
      if (thread == 0) collective_->FinishReduce(one.part);
  }
}

// As WalkTimed. The time of a command is that of both parts, counted from its start in the first one. Nothing is read
// ahead: parts have many rows, for which weights are read in time.
void CpuReplay::WalkParts(uint32_t thread, uint32_t num_threads) {
  claims_.Reset(1 - turn_, thread);  // for the next replay: no thread reads these during this one
  CommandTime* times = times_.Commands(thread);
  ReplayTimes::Spent spent{};
  for (const PartStep& one : order_) {
    const uint64_t start = Ticks();
    RunPart(one, thread, num_threads);
    const uint64_t end = Ticks();
    uint64_t leave = end;
    if (one.meets) {
      team_->Barrier(thread);
      leave = Ticks();
    }
    spent.family[one.step->family] += end - start;
    spent.barrier += leave - end;
    spent.done = leave;
    if (times == nullptr) continue;
    CommandTime& all = times[one.step->command];
    const bool begins = one.part == 0 && one.what != PartStep::What::kFinish;
    all = begins ? CommandTime{start, end, leave}
                 : CommandTime{all.start, all.end + (end - start), all.leave + (leave - start)};
  }
  if (thread == 0) spent_ = spent;
}

}  // namespace llmc
