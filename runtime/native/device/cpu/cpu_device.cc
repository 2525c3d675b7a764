#include "device/cpu/cpu_device.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "device/rank_count.h"

namespace llmc {
namespace {

constexpr uint64_t kReplaysBeforeMove = 16;
constexpr uint64_t kLeastSharedCopy = 4 << 20;  // bytes that several threads copy faster than one

}  // namespace

// Reads only state of the device that steps do not change, so that Prepare may run beside them.
class CpuNewGraphs final : public NewGraphs {
 public:
  CpuNewGraphs(std::shared_ptr<const Artifact> artifact, std::shared_ptr<const Artifact> older,
               const CpuProgram::Memory& memory, uint32_t num_threads, CpuArena arena, const NodeSpread& spread)
      : artifact_(std::move(artifact)),
        older_(std::move(older)),
        memory_(memory),
        num_threads_(num_threads),
        arena_(std::move(arena)),
        spread_(spread) {}

  Status Prepare() override {
    LLMC_RETURN_IF_ERROR(artifact_->CheckExtends(*older_));
    shapes_ = artifact_->shape().graphs;
    std::shared_ptr<const CpuCode> code;
    LLMC_RETURN_IF_ERROR(CpuCode::Load(*artifact_, &code));
    LLMC_RETURN_IF_ERROR(
        CpuProgram::Make(std::move(artifact_), std::move(code), memory_, num_threads_, &arena_, &program_));
    // Touched here, so that no step waits for pages, neither of old graphs nor of new ones.
    program_.TouchOwn();
    if (program_.arena().pages == arena_.pages) return Status::Ok();
    program_.PlaceArena(&spread_);
    uint64_t bytes = arena_.touched_bytes;
    const std::vector<GraphRecord>& graphs = program_.artifact().graphs();
    for (std::size_t g = older_->graphs().size(); g < graphs.size(); ++g)
      bytes = std::max(bytes, graphs[g].arena_bytes);
    program_.TouchArenaBytes(bytes);
    return Status::Ok();
  }

  // Call between two steps, after Prepare.
  void Finish(const CpuProgram& running, const WeightMemory& weights, NodeSpread* spread) {
    if (memory_.weights == nullptr) program_.ResolveWeights(weights);
    if (program_.arena().pages == running.arena().pages) {
      program_.SetTouched(running.arena());
    } else {
      *spread = spread_;
    }
  }
  CpuProgram* program() { return &program_; }
  std::vector<GraphShape>& shapes() { return shapes_; }

 private:
  std::shared_ptr<const Artifact> artifact_, older_;
  CpuProgram::Memory memory_;
  uint32_t num_threads_;
  CpuArena arena_;
  NodeSpread spread_;
  CpuProgram program_;
  std::vector<GraphShape> shapes_;
};

CpuDevice::CpuDevice(ModelShape shape, KvPool pool, AdapterPools adapters, std::shared_ptr<Team> team,
                     const CpuDeviceOptions& options)
    : shape_(std::move(shape)),
      pool_(std::move(pool)),
      adapters_(std::move(adapters)),
      team_(std::move(team)),
      eager_(options.eager),
      stage_(options.collective == nullptr ? 0 : options.collective->stage()),
      one_stage_(options.collective != nullptr && options.collective->num_stages() == 1),
      steps_in_flight_(options.steps_in_flight),
      replay_(team_.get(), pool_.counts(), eager_, options.collective, steps_in_flight_) {}

Status CpuDevice::Create(std::shared_ptr<const Artifact> artifact, const CpuDeviceOptions& options,
                         std::unique_ptr<CpuDevice>* out) {
  LLMC_RETURN_IF_ERROR(CheckPoolCounts(*artifact, options.pool));
  LLMC_RETURN_IF_ERROR(CheckRankCount(*artifact, options.collective.get()));
  // Before anything large is allocated or copied: code that this CPU cannot run is refused at once.
  std::shared_ptr<const CpuCode> code;
  LLMC_RETURN_IF_ERROR(CpuCode::Load(*artifact, &code));
  KvPool pool;
  const uint32_t stage = options.collective == nullptr ? 0 : options.collective->stage();
  LLMC_RETURN_IF_ERROR(KvPool::Allocate(*artifact, stage, options.pool, &pool));
  AdapterPools adapters;
  LLMC_RETURN_IF_ERROR(AdapterPools::Allocate(*artifact, &adapters));
  TeamOptions team_options;
  team_options.num_threads = options.num_threads;
  team_options.pin = options.pin;
  team_options.idle_spin_us = options.idle_spin_us;
  team_options.adapt = options.adapt;
  team_options.clock = options.clock;
  std::shared_ptr<Team> team = options.team;
  if (team == nullptr) {
    std::unique_ptr<Team> made;
    LLMC_RETURN_IF_ERROR(Team::Create(team_options, &made));
    team = std::move(made);
  }
  std::unique_ptr<CpuDevice> device(
      new CpuDevice(artifact->shape(), std::move(pool), std::move(adapters), std::move(team), options));
  LLMC_RETURN_IF_ERROR(device->PlaceMemory(artifact, options));
  LLMC_RETURN_IF_ERROR(device->LoadProgram(std::move(artifact), std::move(code)));
  *out = std::move(device);
  return Status::Ok();
}

// Places memory that exists before a program: pages of pools, and weights.
Status CpuDevice::PlaceMemory(std::shared_ptr<const Artifact> artifact, const CpuDeviceOptions& options) {
  // A single thread needs no spreading: memory that it touches first is on its node.
  if (team_->num_threads() > 1) spread_ = NodeSpread(team_->cpus(), options.nodes);
  spread_pool_bytes_ = spread_.Place(pool_.pages()) + spread_.Place(adapters_.pages());
  // Pages of pools and arena are allocated when they are first used, most of them later.
  const uint64_t reserve = pool_.pages().size() + adapters_.pages().size() + artifact->max_arena_bytes();
  const uint32_t rank = options.collective == nullptr ? 0 : options.collective->rank();
  weights_ = WeightMemory(std::move(artifact), options.weights, reserve, rank);
  if (options.weights.mode == WeightMode::kCopied) {
    while (!weights_.settled()) LLMC_RETURN_IF_ERROR(weights_.Move(team_.get(), &spread_));
  }
  return Status::Ok();
}

Status CpuDevice::LoadProgram(std::shared_ptr<const Artifact> artifact, std::shared_ptr<const CpuCode> code) {
  CpuProgram program;
  LLMC_RETURN_IF_ERROR(
      CpuProgram::Make(std::move(artifact), std::move(code), memory(), team_->num_threads(), nullptr, &program));
  program.PlaceArena(&spread_);
  replay_.Adopt(&program);
  return Status::Ok();
}

// The memory of the second part is that of the first one again.
Status CpuDevice::CutSteps(uint32_t least_rows) {
  const CpuProgram& program = replay_.program();
  CpuProgram second;
  LLMC_RETURN_IF_ERROR(CpuProgram::Make(program.shared_artifact(), program.shared_code(), memory(),
                                        team_->num_threads(), nullptr, &second));
  second.PlaceArena(&spread_);
  replay_.CutSteps(least_rows, std::move(second));
  return Status::Ok();
}

Status CpuDevice::NewGraphsOf(const std::shared_ptr<const Artifact>& artifact, std::unique_ptr<NewGraphs>* out) {
  const CpuProgram& program = replay_.program();
  CpuProgram::Memory shared = memory();
  // While weights are moving, their addresses may be read only between two steps.
  if (!weights_.settled()) shared.weights = nullptr;
  *out = std::make_unique<CpuNewGraphs>(artifact, program.shared_artifact(), shared, team_->num_threads(),
                                        program.arena(), spread_);
  return Status::Ok();
}

void CpuDevice::Adopt(NewGraphs* graphs) {
  CpuNewGraphs& mine = *static_cast<CpuNewGraphs*>(graphs);
  mine.Finish(replay_.program(), weights_, &spread_);
  replay_.Adopt(mine.program());
  shape_.graphs.swap(mine.shapes());
}

// Moves weights only after a few replays: a process that ends soon would only be delayed by a copy.
Status CpuDevice::BeforeStep() {
  if (weights_.settled() || replay_.times().stats().num_replays < kReplaysBeforeMove) return Status::Ok();
  LLMC_RETURN_IF_ERROR(weights_.Move(team_.get(), &spread_));
  replay_.ResolveWeights(weights_);
  return Status::Ok();
}

void CpuDevice::Reserve(const StepBatch& batch) {
  replay_.TouchArena(batch);
  uint64_t num_blocks = 0, num_states = 0;
  for (const int32_t block : batch.block_tables) num_blocks = std::max(num_blocks, static_cast<uint64_t>(block) + 1);
  for (uint64_t i = 0; i < batch.state_slots.size(); i += kStateFields) {
    num_states = std::max(num_states, static_cast<uint64_t>(batch.state_slots[i]) + 1);
  }
  pool_.Touch(PoolKind::kBlocks, num_blocks);
  pool_.Touch(PoolKind::kStates, num_states);
}

// Threads share a copy of several MiB, which states are.
Status CpuDevice::Copy(PoolKind kind, uint32_t from, uint32_t to) {
  LLMC_RETURN_IF_ERROR(CheckCopy(kind, from, to, pool_.counts()[kind]));
  if (from == to) return Status::Ok();
  struct Copied {
    KvPool* pool;
    PoolKind kind;
    uint32_t from, to;
  } copied{&pool_, kind, from, to};
  const auto copy = [](void* context, uint32_t part, uint32_t) {
    const Copied& of = *static_cast<Copied*>(context);
    of.pool->CopyPart(of.kind, part, of.from, of.to);
  };
  const uint64_t bytes = kind == PoolKind::kBlocks ? shape_.kv_block_bytes : shape_.state_bytes;
  ForEach(pool_.num_parts(kind), bytes < kLeastSharedCopy ? 1 : team_->num_threads(), copy, &copied);
  return Status::Ok();
}

Status CpuDevice::Replay(const BatchView& batch, const float** logits) {
  LLMC_RETURN_IF_ERROR(replay_.Start(shape_, batch));
  LLMC_RETURN_IF_ERROR(replay_.Finish());
  *logits = replay_.program().logits();
  return Status::Ok();
}

Status CpuDevice::Enqueue(const StepBatch& batch, Fence* fence) {
  LLMC_RETURN_IF_ERROR(CheckSizes(batch));
  *fence = 0;
  return replay_.Start(shape_, ViewOf(batch));
}

Status CpuDevice::Begin(const StepBatch& batch) {
  LLMC_RETURN_IF_ERROR(CheckSizes(batch));
  LLMC_RETURN_IF_ERROR(replay_.Begin(shape_, ViewOf(batch)));
  begun_ = batch.graph;
  return Status::Ok();
}

Status CpuDevice::RunCommand(uint32_t command) {
  LLMC_RETURN_IF_ERROR(CheckCommand(replay_.program().artifact(), begun_, command));
  return replay_.RunCommand(command);
}

Status CpuDevice::ReadOperand(uint32_t command, uint32_t operand, uint64_t bytes, void* out) {
  LLMC_RETURN_IF_ERROR(CheckOperand(replay_.program().artifact(), begun_, command, operand, bytes));
  return replay_.ReadOperand(command, operand, bytes, out);
}

Status CpuDevice::Wait(Fence, const float** logits) {
  LLMC_RETURN_IF_ERROR(replay_.Finish());
  *logits = replay_.program().logits();
  return Status::Ok();
}

MemorySpread CpuDevice::memory_spread() const {
  return {spread_pool_bytes_ + replay_.spread_bytes() + weights_.spread_bytes(), spread_.num_nodes(), spread_.error()};
}

TeamUse CpuDevice::team_use() const {
  const TeamStats stats = team_->Stats();
  return {stats.size, stats.cuts};
}

void CpuDevice::GetStats(std::vector<DeviceStat>* out) const {
  const TeamUse use = team_use();
  const MemorySpread spread = memory_spread();
  const uint64_t graphs = replay_.program().artifact().graphs().size(), steps = replay_.times().stats().num_replays;
  *out = {{"recorded_graphs", eager_ ? 0 : graphs},
          {"launched_graphs", eager_ ? graphs : 0},
          {"replayed_steps", eager_ ? 0 : steps},
          {"launched_steps", eager_ ? steps : 0},
          {"records_graphs", !eager_},
          {"threads", team_->num_threads()},
          {"working_threads", use.size},
          {"team_jobs", team_->Stats().jobs},
          {"thread_cuts", use.cuts},
          {"weight_bytes", weight_bytes()},
          {"copied_weight_bytes", copied_weight_bytes()},
          {"spread_bytes", spread.bytes},
          {"memory_nodes", spread.num_nodes},
          {"spread_errno", static_cast<uint64_t>(spread.error)}};
  if (replay_.least_cut_rows() == 0) return;
  out->push_back({"overlap_rows", replay_.least_cut_rows()});
  out->push_back({"overlapped_steps", replay_.num_cut()});
}

void CpuDevice::ForEach(uint32_t count, uint32_t num_workers, Job job, void* context) {
  if (std::min({count, num_workers, team_->num_threads()}) < 2)
    return Device::ForEach(count, num_workers, job, context);
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
        for (uint32_t i; (i = all.next.fetch_add(1, std::memory_order_relaxed)) < all.count;)
          all.job(all.context, i, thread);
      },
      &shared);
}

}  // namespace llmc
