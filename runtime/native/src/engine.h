// Engine: continuous batching over one Device. submit, cancel and poll are safe while another thread is in Step.
#pragma once
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "block_manager.h"
#include "device.h"
#include "sampler.h"
#include "scheduler.h"
#include "status.h"

namespace llmc {

struct Request {
  uint64_t id = 0;
  SamplingParams params;
  uint32_t max_length = 0;  // prompt and output
  bool forked = false;      // the prompt is done and all n sequences exist
  bool ended = false;
  uint32_t num_unfinished = 0;
  std::vector<std::unique_ptr<Sequence>> sequences;
};

struct EngineOptions {
  uint32_t max_num_seqs = 0;         // 0: the model's
  uint32_t max_waiting = 0;          // 0: 65536
  uint32_t max_tokens_per_step = 0;  // 0: the largest prefill graph
  bool prefix_cache = true;
  bool error_on_miss = false;
  uint64_t seed = 0;  // of requests without a seed of their own
};

class Engine {
 public:
  static Status Create(std::unique_ptr<Device> device, const EngineOptions& options, std::unique_ptr<Engine>* out);

  Status Submit(const llmc_request& request, uint64_t* id);
  Status Cancel(uint64_t id);
  // One iteration. A failed request is an event; an error here means that the device failed: then every request has
  // failed (one event each) and the engine is empty.
  Status Step(bool* progressed);
  uint64_t Poll(llmc_event* events, uint64_t capacity);
  llmc_engine_stats Stats() const;
  void GraphUse(uint64_t* replays, uint64_t* tokens) const;
  uint32_t num_graphs() const { return static_cast<uint32_t>(model_.graphs.size()); }
  Status CheckIntegrity() const;

 private:
  Engine(std::unique_ptr<Device> device, const EngineOptions& options);

  void TakeInbox();
  void Prepare();
  Status Run(bool replay, const float** logits);
  void Sample(const float* logits);
  void Postprocess();
  void Fork(Sequence* parent);
  void AppendToken(Sequence* sequence, const SampleResult& sample);
  void Finish(Sequence* sequence, uint32_t reason, const SampleResult* stop);
  static void SetSample(const SampleResult& sample, llmc_event* event);
  void EndRequest(Request* request, uint32_t kind, uint32_t reason, llmc_status code);
  void FailAll(llmc_status code);
  void CountTime(bool stepped, uint64_t step_ns);
  void Publish(bool stepped);
  llmc_event MakeEvent(const Sequence& sequence, uint32_t output_index, uint32_t kind) const;

  std::unique_ptr<Device> device_;
  const ModelShape& model_;
  EngineOptions options_;
  uint32_t max_length_;  // of a sequence: the model's limit, or what the KV pool holds if that is less
  BlockManager blocks_;
  Scheduler scheduler_;
  Sampler sampler_;

  // Of the stepping thread.
  StepPlan plan_;
  StepBatch batch_;
  struct Sampled {
    Sequence* sequence;
    Status status;
    SampleResult result;
  };
  std::vector<Sampled> sampled_;
  std::vector<llmc_event> new_events_;
  std::vector<Request*> ended_;
  std::vector<Request*> arrived_, cancelled_;
  llmc_engine_stats counters_;

  mutable std::mutex step_mutex_;  // held by Step and CheckIntegrity
  mutable std::mutex mutex_;       // guards what follows
  uint64_t next_id_ = 1;
  uint32_t num_queued_ = 0;  // requests that have not started
  std::vector<Request*> inbox_, cancel_inbox_;
  std::unordered_map<uint64_t, std::unique_ptr<Request>> live_;
  std::deque<llmc_event> events_;
  llmc_engine_stats stats_;
  std::vector<uint64_t> graph_replays_, graph_tokens_;
};

}  // namespace llmc
