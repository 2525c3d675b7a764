// GpuDevice: steps of an artifact's graphs on one device with launched kernels, in the order of its queue. A kind of
// device brings its parts, and a subclass that copies and waits.
#pragma once
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "artifact/artifact.h"
#include "collective/collective.h"
#include "core/clock.h"
#include "device/command_runner.h"
#include "device/device.h"
#include "device/gpu/gpu_sampling.h"
#include "device/gpu/graph_budget.h"
#include "device/gpu/joining_graphs.h"
#include "device/gpu/launch.h"
#include "device/gpu/offload.h"
#include "device/gpu/step_inputs.h"
#include "device/gpu/swap_time.h"
#include "device/pool_kind.h"
#include "device/rank_count.h"
#include "device/registry.h"

namespace llmc {

struct GpuOptions {
  bool sample = true;  // draw tokens on the device, if the artifact has the kernels
  bool overlap = true;  // prepare the next step while one runs
  OffloadOptions offload;
  GraphBudget graphs;
};

// Parts: Machine, and Scope, in which its functions are called; Queue, Programs, Memory, Work, Graphs, Sampling; Inputs
// and Logits, memory of the host for steps.
template <class Parts>
class GpuDevice : public Device, public CommandRunner {
 public:
  const ModelShape& model() const final { return shape_; }
  uint32_t num_blocks() const final { return memory_->counts().blocks; }
  uint32_t num_states() const final { return memory_->counts().states; }
  bool samples() const final { return sampling_ != nullptr; }
  Overlap overlap() const final { return options_.overlap ? OverlapOf(sampling_.get()) : Overlap::kNone; }
  bool launches(uint32_t graph) const final { return !run_.graphs->is_recorded(graph); }
  CommandRunner* command_runner() final { return this; }

  // Makes new memory, graphs and programs; kernels of graphs that run already are shared.
  Status NewGraphsOf(const std::shared_ptr<const Artifact>& artifact, std::unique_ptr<NewGraphs>* out) final {
    const auto make = [this](const Artifact& extended, Runner* runner) {
      return InScope([&] {
        LLMC_RETURN_IF_ERROR(LoadPrograms(extended, run_.programs.get(), &runner->programs));
        LLMC_RETURN_IF_ERROR(MakeRunner(extended, artifact_->graphs().size(), runner));
        KeepPrograms(*runner);
        return Status::Ok();
      });
    };
    return JoiningGraphs<Runner>::Of({&artifact_, &shape_, &run_}, artifact, make, out);
  }
  void Adopt(NewGraphs* graphs) final { static_cast<JoiningGraphs<Runner>*>(graphs)->Adopt(); }

  Status CheckAlive(uint64_t timeout_ns) final { return machine_->AskAlive(std::chrono::nanoseconds(timeout_ns)); }

  Status Enqueue(const StepBatch& batch, Fence* fence) final {
    *fence = ++last_fence_;
    return OrFinish([&] {
      LLMC_RETURN_IF_ERROR(TakeInputs(batch));
      return Replay(batch);
    });
  }

  Status Wait(Fence, const float** logits) final {
    return InScope([&] { return ReadLogits(num_samples_, logits); });
  }
  Status Await(Fence) final {
    return InScope([&] { return Finish("A step"); });
  }

  Status Sample(Fence, const std::vector<SampleTask>& tasks, std::vector<SampleOutcome>* outcomes) final {
    return InScope([&] {
      if (tasks.empty()) return Finish("A step");
      sampling_->set_logits(run_.work.logits);
      return sampling_->Draw(tasks, outcomes);
    });
  }

  Status Chain(const std::vector<SampleTask>& tasks, const StepBatch& next, const std::vector<DrawnRow>& drawn,
               Fence* fence, bool* chained) final {
    *chained = false;
    const Status status = OrFinish([&] { return SubmitChain(tasks, next, drawn, chained); });
    if (*chained) *fence = ++last_fence_;
    return status;
  }

  Status SampleChained(Fence, const std::vector<SampleTask>& tasks, std::vector<SampleOutcome>* outcomes,
                       bool* lost) final {
    return InScope([&] { return sampling_->End(tasks, outcomes, lost); });
  }

  float* TakenStates() final {
    if (!model().takes_states) return nullptr;
    hidden_given_ = true;
    return HiddenOf(run_);
  }
  Status ReadStates(uint32_t rows, const float** states) final {
    *states = HiddenOf(run_);
    if (rows == 0) return Status::Ok();
    return InScope([&] { return ReadMemory(PlaceOfHidden(), HiddenBytes(rows), HiddenOf(run_)); });
  }

  Status CopyBlock(uint32_t from, uint32_t to) final { return CopyEntry(PoolKind::kBlocks, from, to); }
  Status CopyState(uint32_t from, uint32_t to) final { return CopyEntry(PoolKind::kStates, from, to); }

  Status AwaitCopies() final {
    return InScope([&] { return Finish("Copying KV blocks"); });
  }

  // Block 0 and slot 0 belong to no sequence, so they are used for timing copies.
  Status OpenSwapSpace(uint32_t num_places, uint32_t num_state_places, uint64_t* ns, uint64_t* state_ns) final {
    return InScope([&] {
      *ns = *state_ns = 0;
      const PoolCounts places = {num_places, num_state_places};
      LLMC_RETURN_IF_ERROR(memory_->OpenSwapSpace(places));
      for (const PoolKind kind : kPoolKinds) {
        if (places[kind] == 0) continue;
        const auto copy = [&] {
          LLMC_RETURN_IF_ERROR(memory_->Save(queue_.get(), kind, 0, 0));
          return memory_->Load(queue_.get(), kind, 0, 0);
        };
        const auto finish = [&] { return Finish(TextOf(kind, "Copying KV blocks", "Copying states")); };
        LLMC_RETURN_IF_ERROR(TimeSwap(copy, finish, kind == PoolKind::kBlocks ? ns : state_ns));
      }
      return Status::Ok();
    });
  }
  Status SaveBlock(uint32_t block, uint32_t place) final { return SaveEntry(PoolKind::kBlocks, block, place); }
  Status LoadBlock(uint32_t place, uint32_t block) final { return LoadEntry(PoolKind::kBlocks, place, block); }
  Status SaveState(uint32_t slot, uint32_t place) final { return SaveEntry(PoolKind::kStates, slot, place); }
  Status LoadState(uint32_t place, uint32_t slot) final { return LoadEntry(PoolKind::kStates, place, slot); }

  Status ReadBlock(uint32_t block, unsigned char* out) final {
    return InScope([&] { return ReadEntry(PoolKind::kBlocks, block, out); });
  }
  Status WriteBlock(uint32_t block, const unsigned char* from) final {
    return InScope([&] { return WriteEntry(PoolKind::kBlocks, block, from); });
  }
  Status ReadState(uint32_t slot, unsigned char* out) final {
    return InScope([&] { return ReadEntry(PoolKind::kStates, slot, out); });
  }
  Status WriteState(uint32_t slot, const unsigned char* from) final {
    return InScope([&] { return WriteEntry(PoolKind::kStates, slot, from); });
  }

  void Visit(uint32_t graph) final {
    static_cast<void>(InScope([&] { return RunEmpty(&run_, graph); }).ok());
  }

  void GetStats(std::vector<DeviceStat>* out) const final {
    const uint64_t graphs = artifact_->graphs().size(), recorded = run_.graphs->num_recorded();
    *out = {{"weight_bytes", memory_->bytes().weights},
            {"offloaded_weight_bytes", memory_->offload().bytes()},
            {"offload_ring_bytes", memory_->offload().ring_bytes()},
            {"streamed_weight_bytes", streamed_bytes_},
            {"kv_pool_bytes", memory_->bytes().pools.blocks},
            {"arena_bytes", run_.work.arena_bytes},
            {"graph_bytes", run_.graphs->recorded_bytes()},
            {"recorded_graphs", recorded},
            {"launched_graphs", graphs - recorded},
            {"replayed_steps", replayed_.steps},
            {"replay_host_ns", replayed_.ns},
            {"launched_steps", launched_.steps},
            {"launch_host_ns", launched_.ns},
            {"records_graphs", records()},
            {"saved_blocks", num_saved_.blocks},
            {"loaded_blocks", num_loaded_.blocks}};
    if (model().recurrent()) {
      out->push_back({"state_pool_bytes", memory_->bytes().pools.states});
      out->push_back({"saved_states", num_saved_.states});
      out->push_back({"loaded_states", num_loaded_.states});
    }
    AddProgramStats(out);
    GpuSampling::AddStats(sampling_.get(), out);
  }

  Status Begin(const StepBatch& batch) final {
    return OrFinish([&] {
      LLMC_RETURN_IF_ERROR(TakeInputs(batch));
      begun_ = batch.graph;
      return Finish("Copying a step's inputs");
    });
  }
  Status RunCommand(uint32_t command) final {
    LLMC_RETURN_IF_ERROR(CheckCommand(*artifact_, begun_, command));
    return InScope([&] {
      LLMC_RETURN_IF_ERROR(run_.graphs->EnqueueCommand(begun_, command));
      return Finish("A kernel");
    });
  }
  Status ReadOperand(uint32_t command, uint32_t operand, uint64_t bytes, void* out) final {
    LLMC_RETURN_IF_ERROR(CheckOperand(*artifact_, begun_, command, operand, bytes));
    if (bytes == 0) return Status::Ok();
    return InScope([&] { return ReadMemory(run_.graphs->place(begun_, command, operand), bytes, out); });
  }

 protected:
  using Machine = typename Parts::Machine;
  using Place = typename Parts::Place;
  // State that runs the graphs of an artifact. The other members stay when graphs are added.
  struct Runner {
    std::shared_ptr<const typename Parts::Programs> programs;
    typename Parts::Work work;
    // Copies of steps' device buffers. While inputs are filled, those of the step before may be on their way.
    typename Parts::Inputs inputs[2];
    typename Parts::Logits logits;
    typename Parts::Logits hidden;  // states that the next step takes, or that one has left
    uint32_t filled = 0;  // which inputs were filled last
    std::unique_ptr<typename Parts::Graphs> graphs;
  };

  GpuDevice(std::shared_ptr<const Machine> machine, std::shared_ptr<const Artifact> artifact,
            std::shared_ptr<Collective> ranks, GpuOptions options)
      : machine_(std::move(machine)),
        ranks_(std::move(ranks)),
        artifact_(std::move(artifact)),
        shape_(artifact_->shape()),
        options_(std::move(options)) {}

  // Programs first: code that this device cannot run is refused before anything large is allocated.
  Status Load(const PoolCounts& counts) {
    return InScope([&] {
      LLMC_RETURN_IF_ERROR(CheckPoolCounts(*artifact_, counts));
      LLMC_RETURN_IF_ERROR(CheckRankCount(*artifact_, ranks_.get()));
      LLMC_RETURN_IF_ERROR(LoadPrograms(*artifact_, nullptr, &run_.programs));
      LLMC_RETURN_IF_ERROR(OpenQueue(&queue_));
      if (ranks_ != nullptr) LLMC_RETURN_IF_ERROR(JoinRanks());
      const uint32_t rank = ranks_ == nullptr ? 0 : ranks_->rank();
      LLMC_RETURN_IF_ERROR(
          Parts::Memory::Make(machine_, *artifact_, counts, rank, options_.offload, queue_.get(), &memory_));
      // Of several ranks, the host of rank 0 draws.
      if (options_.sample && ranks_ == nullptr) LLMC_RETURN_IF_ERROR(MakeSampling(&sampling_));
      LLMC_RETURN_IF_ERROR(MakeRunner(*artifact_, 0, &run_));
      if (sampling_ != nullptr) {
        sampling_->set_logits(run_.work.logits);
        sampling_->set_inputs(run_.work.step, run_.graphs->inputs(0));
        LLMC_RETURN_IF_ERROR(sampling_->RunEmpty());
      }
      KeepPrograms(run_);
      return Status::Ok();
    });
  }
  // Call in the destructor of the subclass: what the queue holds uses memory that is freed next.
  void Drain() {
    if (queue_.get() == nullptr) return;
    const typename Parts::Scope scope(*machine_);
    static_cast<void>(Finish("A step").ok());
  }

  // Calls work() in a scope of the machine, unless the device is lost. An error says whether it is from now on.
  template <class Work>
  Status InScope(const Work& work) const {
    LLMC_RETURN_IF_ERROR(machine_->CheckAlive());
    const typename Parts::Scope scope(*machine_);
    LLMC_RETURN_IF_ERROR(scope.status());
    const Status status = work();
    return DeviceGoesOn(status) ? machine_->Judge(status) : status;
  }

  // The functions below are called in such a scope.
  virtual Status LoadPrograms(const Artifact& artifact, const typename Parts::Programs* known,
                              std::shared_ptr<const typename Parts::Programs>* out) const = 0;
  // Called when all kernels of a runner have run.
  virtual void KeepPrograms(const Runner& runner) const { static_cast<void>(runner); }
  virtual Status OpenQueue(typename Parts::Queue* out) const = 0;
  // Of several ranks, each calls it once, before it takes memory.
  virtual Status JoinRanks() { return Status::Ok(); }
  // Copy an entry of pools to the host's memory and back, behind all earlier work, and wait for it.
  virtual Status ReadEntry(PoolKind kind, uint32_t entry, unsigned char* out) = 0;
  virtual Status WriteEntry(PoolKind kind, uint32_t entry, const unsigned char* from) = 0;
  // *out stays empty if the artifact has no kernels that draw.
  virtual Status MakeSampling(std::unique_ptr<typename Parts::Sampling>* out) const = 0;
  // Allocates a runner's memory of the host, and makes its graphs. Its programs and work are there.
  virtual Status MakeGraphs(const Artifact& artifact, Runner* runner) const = 0;
  // The words of the inputs that were filled last.
  virtual int32_t* WordsOf(Runner* runner) const = 0;
  // Copies the first bytes of these to the device.
  virtual Status WriteInputs(const Runner& runner, uint64_t bytes) const = 0;
  // The same for hidden states.
  virtual float* HiddenOf(Runner& runner) const = 0;
  virtual Status WriteHidden(const Runner& runner, uint64_t bytes) const = 0;
  // Begins what was enqueued for a step of that many rows of logits.
  virtual Status Start(uint32_t num_samples) = 0;
  // Waits for that step, and reads its logits.
  virtual Status ReadLogits(uint32_t num_samples, const float** logits) = 0;
  virtual Status ReadMemory(const Place& from, uint64_t bytes, void* out) const = 0;
  // Waits for all that was enqueued. doing: for the error.
  virtual Status Finish(const char* doing) const = 0;
  // As Finish, but not for what other threads enqueue later.
  virtual Status AwaitQueued(const char* doing) const { return Finish(doing); }
  // Whether graphs are recorded at all.
  virtual bool records() const = 0;
  virtual void AddProgramStats(std::vector<DeviceStat>* out) const = 0;

  const Artifact& artifact() const { return *artifact_; }
  const GpuOptions& options() const { return options_; }

  std::shared_ptr<const Machine> machine_;
  std::shared_ptr<Collective> ranks_;  // nullptr: it is alone
  typename Parts::Queue queue_;
  std::unique_ptr<typename Parts::Memory> memory_;
  Runner run_;

 private:
  // As InScope. Behind an error nothing may still read the inputs that the next step fills.
  template <class Work>
  Status OrFinish(const Work& work) const {
    return InScope([&] {
      const Status status = work();
      if (!status.ok()) static_cast<void>(Finish("A step").ok());
      return status;
    });
  }

  Status CopyEntry(PoolKind kind, uint32_t from, uint32_t to) {
    return InScope([&] { return memory_->Copy(queue_.get(), kind, from, to); });
  }
  Status SaveEntry(PoolKind kind, uint32_t entry, uint32_t place) {
    ++num_saved_[kind];
    return InScope([&] { return memory_->Save(queue_.get(), kind, entry, place); });
  }
  Status LoadEntry(PoolKind kind, uint32_t place, uint32_t entry) {
    ++num_loaded_[kind];
    return InScope([&] { return memory_->Load(queue_.get(), kind, place, entry); });
  }

  // first_new: graphs before it have run already. Work that it enqueues has ended when it returns.
  Status MakeRunner(const Artifact& artifact, size_t first_new, Runner* out) {
    LLMC_RETURN_IF_ERROR(memory_->MakeWork(artifact, queue_.get(), &out->work));
    LLMC_RETURN_IF_ERROR(MakeGraphs(artifact, out));
    // A driver may load or finish code at its first use: after this, nothing is compiled or allocated any more.
    for (size_t g = first_new; g < artifact.graphs().size(); ++g) {
      const auto graph = static_cast<uint32_t>(g);
      for (size_t i = 0; i < out->graphs->num_forms(graph); ++i) LLMC_RETURN_IF_ERROR(RunEmpty(out, graph));
    }
    return Status::Ok();
  }

  // Replays a graph without rows, to the end. The arena is cleared because kernels may read row counts from it, too,
  // which an earlier step has written.
  Status RunEmpty(Runner* runner, uint32_t graph) {
    const uint64_t bytes = runner->graphs->inputs(graph).bytes;
    std::memset(WordsOf(runner), 0, bytes);
    const auto enqueue = [&] {
      LLMC_RETURN_IF_ERROR(memory_->ClearArena(queue_.get(), runner->work));
      LLMC_RETURN_IF_ERROR(WriteInputs(*runner, bytes));
      return runner->graphs->Enqueue(graph, {});
    };
    const Status enqueued = enqueue();
    const Status waited = AwaitQueued("Replaying a graph");
    return enqueued.ok() ? waited : enqueued;
  }

  // Checks that the batch suits this device, and fills its inputs; the other copy of inputs may be on its way yet.
  // *bytes: what the device needs of them.
  Status FillInputs(const StepBatch& batch, uint64_t* bytes) {
    LLMC_RETURN_IF_ERROR(CheckSizes(batch));
    LLMC_RETURN_IF_ERROR(CheckBatch(model(), num_blocks(), num_states(), ViewOf(batch)));
    run_.filled = 1 - run_.filled;
    *bytes = FillStep(model(), num_blocks(), batch, run_.graphs->inputs(batch.graph), &tiler_, WordsOf(&run_));
    return Status::Ok();
  }
  Status TakeInputs(const StepBatch& batch) {
    uint64_t bytes = 0;
    LLMC_RETURN_IF_ERROR(FillInputs(batch, &bytes));
    if (std::exchange(hidden_given_, false)) {
      LLMC_RETURN_IF_ERROR(WriteHidden(run_, HiddenBytes(batch.num_tokens)));
    }
    return WriteInputs(run_, bytes);
  }
  uint64_t HiddenBytes(uint32_t rows) const {
    return uint64_t{rows} * static_cast<uint32_t>(model().states_width) * sizeof(float);
  }
  Place PlaceOfHidden() const {
    const OperandRecord operand = {static_cast<uint32_t>(OperandKind::kStates), 0, 0, run_.work.hidden_bytes};
    return memory_->PlaceOf(operand, {}, run_.work);
  }

  Status Replay(const StepBatch& batch) {
    const uint64_t begin = MonotonicNs();
    LLMC_RETURN_IF_ERROR(run_.graphs->Enqueue(batch.graph, {batch.num_tokens, batch.num_samples}));
    num_samples_ = batch.num_samples;
    LLMC_RETURN_IF_ERROR(Start(batch.num_samples));
    streamed_bytes_ += run_.graphs->streamed_bytes(batch.graph);
    HostTime& time = launches(batch.graph) ? launched_ : replayed_;
    ++time.steps;
    time.ns += MonotonicNs() - begin;
    return Status::Ok();
  }

  Status SubmitChain(const std::vector<SampleTask>& tasks, const StepBatch& next, const std::vector<DrawnRow>& drawn,
                     bool* chained) {
    sampling_->set_logits(run_.work.logits);
    bool begun = false;
    LLMC_RETURN_IF_ERROR(sampling_->Begin(tasks, &begun));
    if (!begun) return Status::Ok();
    uint64_t bytes = 0;
    LLMC_RETURN_IF_ERROR(FillInputs(next, &bytes));
    const StepLayout& layout = run_.graphs->inputs(next.graph);
    sampling_->Mark(drawn, WordsOf(&run_) + layout.offsets[kInputIds] / sizeof(int32_t));
    LLMC_RETURN_IF_ERROR(WriteInputs(run_, bytes));
    sampling_->set_inputs(run_.work.step, layout);
    LLMC_RETURN_IF_ERROR(sampling_->Feed(next.num_tokens));
    LLMC_RETURN_IF_ERROR(Replay(next));
    *chained = true;
    return Status::Ok();
  }

  std::shared_ptr<const Artifact> artifact_;
  ModelShape shape_;  // the engine keeps a reference
  const GpuOptions options_;
  std::unique_ptr<typename Parts::Sampling> sampling_;  // nullptr: the host draws
  AdapterTiler tiler_;
  Fence last_fence_ = 0;
  uint32_t num_samples_ = 0;  // of the last step
  bool hidden_given_ = false;  // the host has written states for the next step
  uint32_t begun_ = 0;  // graph of the step that is run command by command
  // Steps, and the host's time for enqueueing their graphs, by whether a recording was replayed.
  struct HostTime {
    uint64_t steps = 0, ns = 0;
  };
  HostTime replayed_, launched_;
  uint64_t streamed_bytes_ = 0;  // weights that all steps have copied from the host
  OfKinds<uint64_t> num_saved_, num_loaded_;
};

}  // namespace llmc
