// Device: what the engine needs of an accelerator. The scheduler and block manager never see one; the engine calls
// it once per step. CpuDevice replays artifact graphs; tests use a null device.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "artifact/model_shape.h"
#include "core/status.h"
#include "device/cpu/memory_nodes.h"

namespace llmc {

// Inputs of one step; int32 arrays packed (ragged) at the front, as FORMAT.md describes. Vectors are reused.
struct StepBatch {
  uint32_t graph = 0;
  uint32_t num_tokens = 0, num_seqs = 0, num_samples = 0, block_table_stride = 0;
  std::vector<int32_t> input_ids, positions, slot_mapping, block_tables, context_lens, query_start, sample_index;
};

// Where the time of a replay went on thread 0; the rest of its wall time is overhead.
struct ReplayTime {
  uint64_t kernel_ns = 0;
  uint64_t barrier_ns = 0;  // waiting for the other threads
};

// How many of a device's threads work now, and how often others' work has made them fewer.
struct TeamUse {
  uint32_t size = 0;
  uint64_t cuts = 0;
};

class Artifact;

class Device {
 public:
  virtual ~Device() = default;
  virtual const ModelShape& model() const = 0;
  // Takes over the graphs that `artifact` has behind those of this device, with which it begins; model() grows by them.
  // Between two steps. On failure nothing has changed.
  virtual Status AddGraphs(std::shared_ptr<const Artifact> artifact) {
    static_cast<void>(artifact);
    return Status::Error(LLMC_ERR_INVALID_ARGUMENT, "This device takes no graphs once it was made.");
  }
  // KV blocks of the pool, the dummy block 0 included.
  virtual uint32_t num_blocks() const = 0;
  virtual uint32_t num_threads() const = 0;
  virtual TeamUse team_use() const { return {num_threads(), 0}; }
  // Between two steps: the next one runs on all threads, so that its time is that of a quiet machine.
  virtual void RecallThreads() {}
  // Before a step: moves a part of the weights to where they are read fastest, if that pays. Changes no result. An error
  // means that weights cannot be read.
  virtual Status SettleWeights() { return Status::Ok(); }
  // Bytes of weights, and of those the bytes that were copied to where they are read fastest.
  virtual uint64_t weight_bytes() const { return 0; }
  virtual uint64_t copied_weight_bytes() const { return 0; }
  virtual MemorySpread memory_spread() const { return {}; }
  // Takes from the system, now, the memory that a replay of this step uses; what lies there stays.
  virtual void Touch(const StepBatch& batch) { static_cast<void>(batch); }
  // Calls every kernel of a graph for no row at all: nothing is computed, but code and commands were fetched.
  virtual void Walk(uint32_t graph) { static_cast<void>(graph); }
  // Replays batch.graph. *logits points to num_samples × vocab_size floats, valid until the next call.
  virtual Status Run(const StepBatch& batch, const float** logits) = 0;
  // Of the last Run; zero on a device that does not measure.
  virtual ReplayTime last_replay() const { return {}; }
  using Job = void (*)(void* context, uint32_t index, uint32_t worker);
  // Calls job once for every index below count, from the device's threads on the host or one after the other, with a
  // number below num_workers that no two calls at a time have. job must not throw.
  virtual void ForEach(uint32_t count, uint32_t num_workers, Job job, void* context) {
    static_cast<void>(num_workers);
    for (uint32_t i = 0; i < count; ++i) job(context, i, 0);
  }
  // Copies one KV block of every layer (copy-on-write).
  virtual Status CopyBlock(uint32_t from, uint32_t to) = 0;
};

}  // namespace llmc
