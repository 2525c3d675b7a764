// CpuReplay: a thread team's pass over the commands of a graph: one job for all of them, or one for each.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "collective/collective.h"
#include "core/status.h"
#include "device/adapters.h"
#include "device/batch.h"
#include "device/cpu/cpu_program.h"
#include "device/cpu/gate.h"
#include "device/cpu/part_order.h"
#include "device/cpu/read_ahead.h"
#include "device/cpu/replay_times.h"
#include "device/cpu/team.h"
#include "device/cut_batch.h"

namespace llmc {

// Counters of the started tasks of each command. Replays alternate between two sets: each resets the other's.
class Claims {
 public:
  Claims() = default;
  // longest: commands of a graph.
  Claims(uint32_t num_threads, std::size_t longest)
      : longest_(longest),
        stride_(RoundUp(longest, kLine) + kLine),  // one cache line apart
        num_threads_(num_threads),
        claimed_(2 * num_threads * stride_) {}

  // For each command: how many of a thread's tasks were claimed, or more.
  std::atomic<uint32_t>* Of(uint32_t turn, uint32_t thread) {
    return claimed_.data() + (std::size_t{turn} * num_threads_ + thread) * stride_;
  }
  void Reset(uint32_t turn, uint32_t thread) {
    std::atomic<uint32_t>* claims = Of(turn, thread);
    for (std::size_t i = 0; i < longest_; ++i) claims[i].store(0, std::memory_order_relaxed);
  }

 private:
  static constexpr std::size_t kLine = kGateLine / sizeof(uint32_t);
  std::size_t longest_ = 0, stride_ = 0, num_threads_ = 0;
  std::vector<std::atomic<uint32_t>> claimed_;  // [turn][thread][command]
};

// What commands are told of the rows of a step.
struct StepRows {
  int64_t scalars[8] = {};
  uint64_t tokens = 0, samples = 0;

  uint64_t Of(const CollectiveRecord& record) const {
    return record.rows == static_cast<uint32_t>(CollectiveRows::kTokens) ? tokens : samples;
  }
};

class CpuReplay {
 public:
  // The team must outlive it. pool: its entries. eager: the team starts and ends at every command. collective:
  // for several ranks. most_started: steps that are started and not finished at a time.
  CpuReplay(Team* team, const PoolCounts& pool, bool eager, std::shared_ptr<Collective> collective,
            uint32_t most_started);

  // Call between two replays; *program then holds the previous one. On an exception nothing has changed.
  void Adopt(CpuProgram* program);
  CpuProgram& program() { return program_; }
  const CpuProgram& program() const { return program_; }

  // From so many rows on, a step runs in two parts: sums of the ranks go on beside the kernels of the other part.
  // second: as the program, with memory of its own. Call once; not where steps have stages or hidden states.
  void CutSteps(uint32_t least_rows, CpuProgram second);
  uint32_t least_cut_rows() const { return least_cut_rows_; }  // 0: none are cut
  uint64_t num_cut() const { return num_cut_; }
  // Of the program, or both. As the functions of CpuProgram.
  void ResolveWeights(const WeightMemory& weights);
  void Release(uint32_t graph);
  void TouchArena(const StepBatch& batch);
  uint64_t spread_bytes() const { return program_.spread_bytes() + (second_ ? second_->spread_bytes() : 0); }

  // Replays a graph, except for results that are made by another stage. On failure nothing ran, or a rank has ended and
  // no further step will run.
  Status Start(const ModelShape& model, const BatchView& batch);
  // Takes the results of the oldest started step; its program then holds the logits.
  Status Finish();
  // Replays a graph without any row.
  void Visit(uint32_t graph);
  // Takes the inputs of a step whose commands then run one by one on the calling thread.
  Status Begin(const ModelShape& model, const BatchView& batch);
  Status RunCommand(uint32_t command) const;
  // Copies the first bytes of an operand of a command in that step.
  Status ReadOperand(uint32_t command, uint32_t index, uint64_t bytes, void* out) const;

  ReplayTimes& times() { return times_; }
  const ReplayTimes& times() const { return times_; }

 private:
  using Step = CpuProgram::Step;
  // Of a graph's commands: those before the results of another stage, and those that take them.
  enum class Part { kOwn, kResults };

  void CopyInputs(const BatchView& batch, CpuProgram* program, StepRows* rows);
  // The step of a command of the graph that was begun.
  Status Find(uint32_t command, const Step** out) const;
  void RunTeam(uint32_t graph, Part part);
  void TakeTurn(uint32_t size);
  void RunJob(CpuProgram::StepRange steps, uint32_t size);
  void RunParts(const BatchView& batch);
  void RunPart(const PartStep& one, uint32_t thread, uint32_t num_threads);
  void WalkParts(uint32_t thread, uint32_t num_threads);
  void LookAhead(const Step& step, uint32_t thread, uint32_t num_threads, ReadAhead* ahead) const;
  static Reduction ReductionOf(const Step& step, const StepRows& of);
  void RunCollective(const Step& step, const StepRows& of, uint32_t thread, uint32_t num_threads) const;
  // kTends: between tasks, the transport of the ranks gets its turn.
  template <bool kTends>
  void Compute(const Step& step, const StepRows& rows, std::size_t index, uint32_t thread, uint32_t num_threads);
  void Walk(uint32_t thread, uint32_t num_threads);
  void WalkTimed(uint32_t thread, uint32_t num_threads);

  Team* team_;
  const PoolCounts pool_;
  const bool eager_;
  uint64_t most_ahead_bytes_;
  std::shared_ptr<Collective> collective_;  // null: this rank is alone
  CpuProgram program_;
  Claims claims_;

  AdapterTiler tiler_;

  // A step whose results are still to be taken.
  struct Started {
    uint32_t graph;
    uint64_t tokens, samples, outbox;
    ReplayTimes::Spent spent;
    uint64_t start, end, ns;  // of what has run: ticks, and a duration
  };

  // Steps use the parts of an outbox in turn. So a stage is at most that many steps ahead of the next one. The last one
  // never waits for the first, which takes the results of a step before it starts so many others.
  uint32_t most_started_;
  uint64_t num_steps_ = 0, passed_bytes_ = 0;
  std::deque<Started> started_;

  // Rows of the current step, or of its first part, and where its part of an outbox begins.
  StepRows rows_;
  uint64_t outbox_ = 0;

  // Of steps in two parts.
  uint32_t least_cut_rows_ = 0;
  uint64_t num_cut_ = 0;
  std::unique_ptr<CpuProgram> second_;
  BatchParts parts_;
  StepRows second_rows_;
  std::vector<PartStep> order_;

  uint32_t turn_ = 0;
  uint32_t last_size_ = 0;  // threads of the last replay
  CpuProgram::StepRange current_{};
  ReplayTimes::Spent spent_{};
  ReplayTimes times_;
};

}  // namespace llmc
