// Device: interface of an accelerator to the engine, which enqueues one step at a time and waits at its fence.
// Scheduler and block manager never see a device. Features of single kinds of devices stay inside them.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "artifact/model_shape.h"
#include "core/clock.h"
#include "core/status.h"
#include "device/adapters.h"
#include "device/batch.h"
#include "sampling/sampler.h"

namespace llmc {

// Parts of a replay's time, as its device measures them; the rest of its wall time is overhead.
struct ReplayTime {
  uint64_t kernel_ns = 0;
  uint64_t barrier_ns = 0;  // workers waiting for one another
};

// A counter of a device. The name is valid as long as the library is loaded.
struct DeviceStat {
  const char* name;
  uint64_t value;
};

// Names an enqueued step.
using Fence = uint64_t;

// What the engine may do while a step runs.
enum class Overlap {
  kNone,  // nothing: a step has ended when Enqueue returns
  kPrepared,  // plan the next step, to enqueue it as soon as this one has ended
  kChained,  // also enqueue it before the tokens of this one are known
  kDisjoint,  // enqueue steps of other sequences, as many as steps_in_flight()
};

// A row of a batch whose input id is the token that task `task` of the step before draws.
struct DrawnRow {
  uint32_t row, task;
};

class Artifact;
class CommandRunner;
class ReplayProfile;

// Graphs that a device is about to take over. The slow part runs beside steps.
class NewGraphs {
 public:
  virtual ~NewGraphs() = default;
  // Call once, before Device::Adopt. Any thread may call it, beside steps.
  virtual Status Prepare() = 0;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual const ModelShape& model() const = 0;
  // KV blocks of the pool, with the dummy block 0.
  virtual uint32_t num_blocks() const = 0;
  // Slots for the states of sequences of a recurrent model, with the dummy slot 0; else 0.
  virtual uint32_t num_states() const { return 0; }
  // Takes over the graphs that `artifact` has beyond those of this device, which must be equal, in three parts.
  // NewGraphsOf and Adopt are quick and run between two steps; Prepare runs in between. One at a time.
  virtual Status NewGraphsOf(const std::shared_ptr<const Artifact>& artifact, std::unique_ptr<NewGraphs>* out) {
    static_cast<void>(artifact), static_cast<void>(out);
    return Status::Error(LLMC_ERR_INVALID_ARGUMENT, "This device takes no graphs once it was made.");
  }
  // Adds the graphs to model(). On an exception nothing has changed. `graphs` takes what they replace: destroy it
  // beside steps, since freeing takes time.
  virtual void Adopt(NewGraphs* graphs) { static_cast<void>(graphs); }
  // Does all three between two steps. An error leaves all unchanged.
  Status AddGraphs(const std::shared_ptr<const Artifact>& artifact) {
    std::unique_ptr<NewGraphs> graphs;
    LLMC_RETURN_IF_ERROR(NewGraphsOf(artifact, &graphs));
    LLMC_RETURN_IF_ERROR(graphs->Prepare());
    Adopt(graphs.get());
    return Status::Ok();
  }

  // Fills an adapter slot; matrices that are not given become empty. Any thread may call it, also beside a step that
  // does not use the slot. Allocates nothing that steps wait for.
  virtual Status LoadAdapter(uint32_t slot, const std::vector<AdapterMatrix>& matrices) {
    static_cast<void>(slot), static_cast<void>(matrices);
    return Status::Error(LLMC_ERR_INVALID_ARGUMENT, "This device takes no adapters.");
  }

  // Called once before each step that Enqueue begins, while nothing runs: housekeeping that changes no result. On an
  // error the step cannot run.
  virtual Status BeforeStep() { return Status::Ok(); }
  // Asks for a sign of life while nothing runs: no launch, and no work of steps. An error: the device is lost to this
  // process, or did not answer within that time. Other calls may wait meanwhile.
  virtual Status CheckAlive(uint64_t timeout_ns) {
    static_cast<void>(timeout_ns);
    return Status::Ok();
  }
  // Begins a step, behind all earlier work. The batch may change once this returns. Only one step is in flight at a
  // time, but for those that Chain begins, and for steps_in_flight(). On an error nothing runs.
  virtual Status Enqueue(const StepBatch& batch, Fence* fence) = 0;
  // Waits for the step, the oldest in flight. *logits points to num_samples × output_width floats, valid until the next
  // Enqueue or Wait.
  virtual Status Wait(Fence fence, const float** logits) = 0;
  // As Wait, for a step whose results nobody wants.
  virtual Status Await(Fence fence) {
    const float* logits = nullptr;
    return Wait(fence, &logits);
  }
  // Hidden states of a step's rows are float32 [num_tokens][states_width]. A model that takes states reads what is
  // written here, in host memory, at the next Enqueue; if nothing was asked for, what the step before left. nullptr: the
  // model takes none.
  virtual float* TakenStates() { return nullptr; }
  // The states that a model leaves, once its step has been waited for: of the first `rows` rows, in host memory. They are
  // valid until the next Enqueue or TakenStates.
  virtual Status ReadStates(uint32_t rows, const float** states) {
    static_cast<void>(rows), static_cast<void>(states);
    return Status::Error(LLMC_ERR_INTERNAL, "This device keeps no hidden states.");
  }
  // Whether Sample draws on the device. Else the host draws from the rows that Wait gives.
  virtual bool samples() const { return false; }
  // Replaces Wait: waits for the step and for its draws. These follow the rules of sampling/sampler.h, so they give the
  // host's tokens. outcomes: [task]; its status has errors of that task alone. Those of unwanted tasks stay as they are.
  virtual Status Sample(Fence fence, const std::vector<SampleTask>& tasks, std::vector<SampleOutcome>* outcomes) {
    static_cast<void>(fence), static_cast<void>(tasks), static_cast<void>(outcomes);
    return Status::Error(LLMC_ERR_INTERNAL, "This device draws no tokens.");
  }
  // Where overlap() is kChained: enqueues the draws of the step in flight and, behind them, the step `next`, whose drawn
  // rows the device fills. SampleChained, with the fence of the step before, then waits for the draws alone, and `next` is
  // the step in flight. The caller may change `next` once this returns. *chained: false if the host is needed in between;
  // then nothing was enqueued. On an error nothing runs.
  virtual Status Chain(const std::vector<SampleTask>& tasks, const StepBatch& next, const std::vector<DrawnRow>& drawn,
                       Fence* fence, bool* chained) {
    static_cast<void>(tasks), static_cast<void>(next), static_cast<void>(drawn), static_cast<void>(fence);
    *chained = false;
    return Status::Ok();
  }
  // Replaces Sample behind Chain. *lost: the host must draw a token from logits that are gone. Then the step must run
  // again, and the one behind it has read wrong tokens.
  virtual Status SampleChained(Fence fence, const std::vector<SampleTask>& tasks, std::vector<SampleOutcome>* outcomes,
                               bool* lost) {
    *lost = false;
    return Sample(fence, tasks, outcomes);
  }
  // Other than with kNone, a step may also be in flight between two calls of llmc_engine_step.
  virtual Overlap overlap() const { return Overlap::kNone; }
  // Where overlap() is kDisjoint: most steps in flight, no two of which have a sequence in common. Other calls follow all
  // steps that were enqueued before, as on a device that runs one step after the other.
  virtual uint32_t steps_in_flight() const { return 1; }
  // Whether steps of several ranks may run in two parts, see CutSteps.
  virtual bool cuts_steps() const { return false; }
  // From least_rows rows on, runs a step in two parts, with the same bits: sums of the ranks go on beside the kernels of
  // the other part. Call once, before any step of requests, on all ranks with the same number.
  virtual Status CutSteps(uint32_t least_rows) {
    static_cast<void>(least_rows);
    return Status::Error(LLMC_ERR_INTERNAL, "This device runs each step in one piece.");
  }
  Status Run(const StepBatch& batch, const float** logits) {
    Fence fence = 0;
    LLMC_RETURN_IF_ERROR(Enqueue(batch, &fence));
    return Wait(fence, logits);
  }
  // Copies one KV block of every layer with keys and values (copy-on-write), behind all earlier work.
  virtual Status CopyBlock(uint32_t from, uint32_t to) = 0;
  // Copies a slot of states, of every layer that has one, behind all earlier work.
  virtual Status CopyState(uint32_t from, uint32_t to) {
    static_cast<void>(from), static_cast<void>(to);
    return Status::Error(LLMC_ERR_INTERNAL, "This device keeps no states.");
  }

  // Waits for the copies of blocks and states so far. To be called where no step follows them, whose fence would tell that they
  // failed.
  virtual Status AwaitCopies() { return Status::Ok(); }

  // Allocates swap space in the host's memory: places for blocks, and others for states. Call once, before any step.
  // *ns: time of saving and loading a block. *state_ns: of a slot of states, 0 without.
  virtual Status OpenSwapSpace(uint32_t num_places, uint32_t num_state_places, uint64_t* ns, uint64_t* state_ns) {
    static_cast<void>(num_places), static_cast<void>(num_state_places), static_cast<void>(ns);
    static_cast<void>(state_ns);
    return Status::Error(LLMC_ERR_INVALID_ARGUMENT,
                         "This device's KV blocks are in the host's memory already; leave the swap space out.");
  }
  // Copy one KV block of every layer to the swap space and back, behind all earlier work.
  virtual Status SaveBlock(uint32_t block, uint32_t place) {
    static_cast<void>(block), static_cast<void>(place);
    return Status::Error(LLMC_ERR_INTERNAL, "This device has no swap space.");
  }
  virtual Status LoadBlock(uint32_t place, uint32_t block) {
    static_cast<void>(block), static_cast<void>(place);
    return Status::Error(LLMC_ERR_INTERNAL, "This device has no swap space.");
  }
  // The same for a slot of states and a place for them.
  virtual Status SaveState(uint32_t slot, uint32_t place) {
    static_cast<void>(slot), static_cast<void>(place);
    return Status::Error(LLMC_ERR_INTERNAL, "This device has no swap space for states.");
  }
  virtual Status LoadState(uint32_t place, uint32_t slot) {
    static_cast<void>(slot), static_cast<void>(place);
    return Status::Error(LLMC_ERR_INTERNAL, "This device has no swap space for states.");
  }

  // Copy the KV of one block of every layer to host memory and back, behind all earlier work; done when they return.
  // Layer after layer, K before V: kv_block_bytes of the model. Cached blocks go to other engines this way.
  virtual Status ReadBlock(uint32_t block, unsigned char* out) {
    static_cast<void>(block), static_cast<void>(out);
    return Status::Invalid("This device hands over no KV blocks; let each engine compute its prompts.");
  }
  virtual Status WriteBlock(uint32_t block, const unsigned char* from) {
    static_cast<void>(block), static_cast<void>(from);
    return Status::Invalid("This device takes no KV blocks; let each engine compute its prompts.");
  }
  // The same for a slot of states: state_bytes of the model, of layers with one.
  virtual Status ReadState(uint32_t slot, unsigned char* out) {
    static_cast<void>(slot), static_cast<void>(out);
    return Status::Invalid("This device hands over no states; let each engine compute its prompts.");
  }
  virtual Status WriteState(uint32_t slot, const unsigned char* from) {
    static_cast<void>(slot), static_cast<void>(from);
    return Status::Invalid("This device takes no states; let each engine compute its prompts.");
  }

  // For the warm-up, while nothing runs. Allocates the memory that this step uses now; its contents stay.
  virtual void Reserve(const StepBatch& batch) { static_cast<void>(batch); }
  // Replays a graph with zero rows: fetches code and commands, computes nothing.
  virtual void Visit(uint32_t graph) { static_cast<void>(graph); }
  // Call between two steps. Frees the memory that only this graph uses; running the graph again allocates it anew.
  virtual void Release(uint32_t graph) { static_cast<void>(graph); }
  // Whether steps of a graph run as launches of its kernels, one by one, since the graph has no recording to replay.
  virtual bool launches(uint32_t graph) const {
    static_cast<void>(graph);
    return false;
  }
  // Lets the next step run on all resources of the device, so that its time is that of a quiet machine.
  virtual void Recall() {}

  // Threads of the host that run jobs, such as sampling, between two calls of Enqueue and Wait.
  virtual uint32_t num_host_threads() const { return 1; }
  using Job = void (*)(void* context, uint32_t index, uint32_t worker);
  // Calls job once for every index below count, on those threads or one after the other. No two calls at a time have
  // the same worker, a number below num_workers. job must not throw.
  virtual void ForEach(uint32_t count, uint32_t num_workers, Job job, void* context) {
    static_cast<void>(num_workers);
    for (uint32_t i = 0; i < count; ++i) job(context, i, 0);
  }

  // Times of the last step; zero on a device that does not measure.
  virtual ReplayTime last_replay() const { return {}; }
  // Writes the device's counters to *out, always with the same names in the same order.
  virtual void GetStats(std::vector<DeviceStat>* out) const { out->clear(); }
  // Nanoseconds that pass as steps run; a simulated device has its own.
  virtual uint64_t ClockNs() const { return MonotonicNs(); }
  // The token that all guesses are, on a device that simulates them; -1: guesses are real.
  virtual int32_t made_up_guess() const { return -1; }
  // For tools; nullptr if the device does not support them.
  virtual ReplayProfile* profile() { return nullptr; }
  virtual CommandRunner* command_runner() { return nullptr; }
};

}  // namespace llmc
