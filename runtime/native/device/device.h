// Device: what the engine needs of an accelerator. The scheduler and block manager never see one; the engine enqueues one
// step at a time and waits at its fence. What only some devices have stays inside of them.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "artifact/model_shape.h"
#include "core/status.h"
#include "device/adapters.h"
#include "device/batch.h"
#include "sampling/sampler.h"

namespace llmc {

// Where the time of a replay went, as its device counts it; the rest of its wall time is overhead.
struct ReplayTime {
  uint64_t kernel_ns = 0;
  uint64_t barrier_ns = 0;  // workers waiting for one another
};

// A fact of a device: the name lives as long as the library.
struct DeviceStat {
  const char* name;
  uint64_t value;
};

// A step that was enqueued.
using Fence = uint64_t;

// What the engine may do while a step runs.
enum class Overlap {
  kNone,  // nothing: a step has ended when Enqueue returns
  kPrepared,  // plan the next step, to enqueue it as soon as this one has ended
};

class Artifact;
class CommandRunner;
class ReplayProfile;

// Graphs on their way into a device: what takes long of taking them over, done beside the steps of those it has.
class NewGraphs {
 public:
  virtual ~NewGraphs() = default;
  // Beside steps, on any thread. Once, before Device::Adopt.
  virtual Status Prepare() = 0;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual const ModelShape& model() const = 0;
  // KV blocks of the pool, the dummy block 0 included.
  virtual uint32_t num_blocks() const = 0;
  // Taking over the graphs that `artifact` has behind those of this device, with which it begins, in three parts: this one
  // and Adopt between two steps, both quick, and Prepare in between. One at a time.
  virtual Status NewGraphsOf(const std::shared_ptr<const Artifact>& artifact, std::unique_ptr<NewGraphs>* out) {
    static_cast<void>(artifact), static_cast<void>(out);
    return Status::Error(LLMC_ERR_INVALID_ARGUMENT, "This device takes no graphs once it was made.");
  }
  // model() grows by them. On an exception nothing has changed. What they replace is theirs from now on, and goes with
  // them: elsewhere than between two steps.
  virtual void Adopt(NewGraphs* graphs) { static_cast<void>(graphs); }
  // All three at once, between two steps. On failure nothing has changed.
  Status AddGraphs(const std::shared_ptr<const Artifact>& artifact) {
    std::unique_ptr<NewGraphs> graphs;
    LLMC_RETURN_IF_ERROR(NewGraphsOf(artifact, &graphs));
    LLMC_RETURN_IF_ERROR(graphs->Prepare());
    Adopt(graphs.get());
    return Status::Ok();
  }

  // Fills a slot of adapters; what the adapter says nothing of becomes empty. From any thread, also while a step runs that
  // does not use the slot. Allocates nothing that steps wait for.
  virtual Status LoadAdapter(uint32_t slot, const std::vector<AdapterMatrix>& matrices) {
    static_cast<void>(slot), static_cast<void>(matrices);
    return Status::Error(LLMC_ERR_INVALID_ARGUMENT, "This device takes no adapters.");
  }

  // Called once before each step, while nothing runs: what a device does for itself between steps. Changes no result. On
  // an error the step cannot run.
  virtual Status BeforeStep() { return Status::Ok(); }
  // Begins a step, behind all that was asked for before. The batch may change once this returns; one step at a time is on
  // its way. On an error nothing runs.
  virtual Status Enqueue(const StepBatch& batch, Fence* fence) = 0;
  // Returns when the step is done. *logits points to num_samples × output_width floats, valid until the next Enqueue.
  virtual Status Wait(Fence fence, const float** logits) = 0;
  // Hidden states of the rows of a step, float32 [num_tokens][states_width], in the host's memory: what the next Enqueue
  // reads of a model that takes them, and what a step that was waited for has left. nullptr: there are none.
  virtual float* states() { return nullptr; }
  // Whether Sample draws on the device. Else the host draws from the rows that Wait gives.
  virtual bool samples() const { return false; }
  // In place of Wait: returns when the step is done and its tasks are drawn, by the rules of sampling/sampler.h, so with
  // the host's tokens. outcomes: one for each task; what fails a task alone is in its status.
  virtual Status Sample(Fence fence, const std::vector<SampleTask>& tasks, std::vector<SampleOutcome>* outcomes) {
    static_cast<void>(fence), static_cast<void>(tasks), static_cast<void>(outcomes);
    return Status::Error(LLMC_ERR_INTERNAL, "This device draws no tokens.");
  }
  // A device that says kPrepared may also have a step on its way between two calls of llmc_engine_step.
  virtual Overlap overlap() const { return Overlap::kNone; }
  Status Run(const StepBatch& batch, const float** logits) {
    Fence fence = 0;
    LLMC_RETURN_IF_ERROR(Enqueue(batch, &fence));
    return Wait(fence, logits);
  }
  // Copies one KV block of every layer (copy-on-write), behind all that was asked for before.
  virtual Status CopyBlock(uint32_t from, uint32_t to) = 0;

  // Room for blocks in the host's memory, beside the device; once, before any step. *ns becomes what a block takes there
  // and back.
  virtual Status OpenSwapSpace(uint32_t num_places, uint64_t* ns) {
    static_cast<void>(num_places), static_cast<void>(ns);
    return Status::Error(LLMC_ERR_INVALID_ARGUMENT,
                         "This device's KV blocks are in the host's memory already; leave the swap space out.");
  }
  // Copy one KV block of every layer to such a place, and back, behind all that was asked for before.
  virtual Status SaveBlock(uint32_t block, uint32_t place) {
    static_cast<void>(block), static_cast<void>(place);
    return Status::Error(LLMC_ERR_INTERNAL, "This device has no swap space.");
  }
  virtual Status LoadBlock(uint32_t place, uint32_t block) {
    static_cast<void>(block), static_cast<void>(place);
    return Status::Error(LLMC_ERR_INTERNAL, "This device has no swap space.");
  }

  // Warm-up, while nothing runs. Takes from the system, now, the memory that this step uses; what lies there stays.
  virtual void Reserve(const StepBatch& batch) { static_cast<void>(batch); }
  // Replays a graph for no row at all: nothing is computed, but code and commands were fetched.
  virtual void Visit(uint32_t graph) { static_cast<void>(graph); }
  // Between two steps. Gives back what memory this graph alone takes; should it run again, it is made anew.
  virtual void Release(uint32_t graph) { static_cast<void>(graph); }
  // The next step runs on all that the device has, so that its time is that of a quiet machine.
  virtual void Recall() {}

  // Threads of the host that run jobs while nothing is enqueued: sampling, for one.
  virtual uint32_t num_host_threads() const { return 1; }
  using Job = void (*)(void* context, uint32_t index, uint32_t worker);
  // Calls job once for every index below count, on those threads or one after the other, with a number below num_workers
  // that no two calls at a time have. job must not throw.
  virtual void ForEach(uint32_t count, uint32_t num_workers, Job job, void* context) {
    static_cast<void>(num_workers);
    for (uint32_t i = 0; i < count; ++i) job(context, i, 0);
  }

  // Of the last step; zero on a device that does not measure.
  virtual ReplayTime last_replay() const { return {}; }
  // Puts what the device counts into *out, always the same names in the same order.
  virtual void GetStats(std::vector<DeviceStat>* out) const { out->clear(); }
  // For tools; nullptr where a device cannot tell.
  virtual ReplayProfile* profile() { return nullptr; }
  virtual CommandRunner* command_runner() { return nullptr; }
};

}  // namespace llmc
