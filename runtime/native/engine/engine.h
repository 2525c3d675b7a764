// Engine: continuous batching over one Device. Calls are safe and quick while another thread is in Step, except
// CheckIntegrity, the warm-up and changes of graphs, which wait for it. Where steps overlap, a step may be in flight
// when Step returns: calls that need an idle device end it first.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/status.h"
#include "device/device.h"
#include "engine/ahead.h"
#include "engine/block_manager.h"
#include "engine/handed_blocks.h"
#include "engine/host_sampler.h"
#include "engine/request.h"
#include "engine/request_marks.h"
#include "engine/scheduler.h"
#include "engine/speculation/speculator.h"
#include "engine/step_shapes.h"
#include "engine/token_mask.h"

namespace llmc {

// An adapter that is loaded or being loaded. Requests that use it keep it when it is unloaded.
struct Adapter {
  uint32_t slot = 0, num_requests = 0;
  bool ready = false, unloaded = false;
};

// A text whose blocks are handed over, part by part. One thread at a time.
struct HandedText {
  const std::vector<int32_t> tokens;
  BlockManager::Place place;  // behind the last part
};

// Load that a warm-up replays; 0: as much as the bucket holds.
struct WarmLoad {
  uint32_t num_seqs = 0, tokens_each = 0, context = 0;
};

struct EngineOptions {
  uint32_t max_num_seqs = 0;  // 0: the model's
  uint32_t max_waiting = 0;  // 0: 65536
  uint32_t max_tokens_per_step = 0;  // 0: the largest prefill graph
  bool prefix_cache = true;
  uint32_t keep_states_every = SchedulerOptions::kKeepEvery;  // tokens, of a recurrent model
  uint64_t swap_bytes = 0;  // host memory for blocks of preempted sequences
  bool swap_always = false;  // also where recomputing them is cheaper
  MissPolicy miss_policy = MissPolicy::kLarger;
  uint32_t priority_patience = 0;  // steps; 0: SchedulerOptions::kDefaultPatience
  uint64_t seed = 0;  // for requests without a seed of their own
  uint32_t speculate_tokens = 0;  // most guesses per sequence and step
  bool speculate_always = false;  // all guesses that a graph holds, whether they pay or not
};

class Engine {
 public:
  // draft: device of a draft model; nullptr: guesses are looked up in prompt and output.
  static Status Create(std::unique_ptr<Device> device, const EngineOptions& options, std::unique_ptr<Engine>* out,
                       std::unique_ptr<Device> draft = nullptr);
  // Waits for a step in flight.
  ~Engine();

  // request.sampling is not NULL here.
  Status Submit(const llmc_request& c, uint64_t* id);
  Status Cancel(uint64_t id);
  // Fills a free slot. A step in flight goes on meanwhile.
  Status LoadAdapter(const std::vector<AdapterMatrix>& matrices, uint64_t* id);
  // New requests may not use the adapter; its slot is free once the last request that uses it has ended.
  Status UnloadAdapter(uint64_t id);
  // Masks of the next token and of the token after each guess. words: [num_guesses + 1][num_words].
  Status SetTokenMasks(uint64_t id, uint32_t output_index, const uint32_t* words, uint64_t num_words,
                       const int32_t* guesses = nullptr, uint64_t num_guesses = 0);
  // Guesses after the text of a guided continuation: those that are worth masks, at most `capacity`.
  Status GetGuesses(uint64_t id, uint32_t output_index, int32_t* tokens, uint64_t capacity, uint64_t* count) const;
  // Whether blocks can be handed over, which the calls below require.
  Status CheckHandOver() const;
  // Leading whole blocks of a text that are cached; of a recurrent model, up to the last one with a state.
  uint64_t CountBlocks(const HandedText& text) const;
  // Cached blocks of a text from first_block on, as HandedBlocks without checksums, at most `capacity` bytes.
  Status ExportBlocks(HandedText* text, uint64_t first_block, unsigned char* out, uint64_t capacity,
                      uint64_t* num_blocks, uint64_t* bytes);
  // Enters blocks of another engine into the prefix cache, where a block is free. num_blocks: leading blocks of the text
  // that are cached then. Compares no checksums.
  Status ImportBlocks(HandedText* text, const void* data, uint64_t bytes, uint64_t* num_blocks);
  // As of HandedBlocks. They touch no engine's state, so no step waits for them.
  Status SealBlocks(void* data, uint64_t bytes) const { return HandedBlocks::Seal(model_, data, bytes); }
  Status CheckBlocks(const HandedText& text, const void* data, uint64_t bytes) const;
  // LLMC_READY_ bits; 0 after the timeout.
  uint32_t Wait(uint64_t timeout_ns);
  // One iteration: ends a step, and where steps overlap starts the next one. A failed request is an event. An error or
  // std::bad_alloc means that the device failed or memory ran out. Requests have failed then, one event each: those of
  // steps on their way if the device goes on (FailSteps), else all of them, and the engine is empty.
  Status Step(bool* progressed);
  // Replays made-up tokens that write to the dummy block only.
  Status WarmGraph(uint32_t graph, const WarmLoad& load, uint64_t* ns);
  // Warms up every graph of the draft. ns: time of all of it.
  Status WarmDraft(uint64_t* ns);
  // Calls every kernel of a graph with zero rows.
  Status WalkGraph(uint32_t graph, uint64_t* ns);
  // Asks the device for a sign of life, unless a step is in flight. An error: it is lost, and steps will fail.
  Status CheckDevice(uint64_t timeout_ns);
  // Whether requests may run in this graph; all are on at first. Waits for a step in flight.
  Status EnableGraph(uint32_t graph, bool on);
  // Frees the memory that only this graph uses, which must be off. Once it is on, its first step allocates it again.
  Status ReleaseGraph(uint32_t graph);
  // Adds the graphs that `artifact` has beyond the engine's own; they are off. Steps pause for an instant only.
  Status AddGraphs(const std::shared_ptr<const Artifact>& artifact);
  uint64_t Poll(llmc_event* events, uint64_t capacity);
  llmc_engine_stats Stats() const;
  std::vector<DeviceStat> DeviceStats() const;
  std::vector<llmc_graph_stats> GraphStats() const;
  std::vector<llmc_bucket_miss> BucketMisses() const;
  // As StepShapes::Take.
  std::vector<llmc_step_shape> TakeStepShapes(uint64_t* lost);
  // As RequestMarks::Take.
  std::vector<llmc_request_mark> TakeRequestMarks(bool* complete);
  std::vector<llmc_eviction_count> Evictions() const;
  uint32_t num_graphs() const;
  Status CheckIntegrity() const;

 private:
  Engine(std::unique_ptr<Device> device, const EngineOptions& options, std::unique_ptr<DraftModel> draft);

  // engine.cc: the loop.
  Status OpenSwapSpace();
  template <class Call>
  Status OrForget(const Call& call);
  Status StepOnce(bool* progressed);
  Status Land();
  Status BeginStep(EngineStep* step, bool* run);
  Status BeginMore();
  void GoOn();
  Status EndStep(bool goes_on, uint64_t since_ns, bool* stepped);
  Status CopyBlocks(const StepPlan& plan);
  Status Enqueue(EngineStep* step);
  void TakeArrivals();
  void TakeInbox(uint64_t now);
  void CountPrefill();
  void MarkPreempted(const EngineStep& step);
  void MarkChunks(uint64_t done_ns);
  void CountTime(bool stepped, uint64_t step_ns);

  // ahead.cc: the step planned behind the one in flight.
  static Continues HowContinues(const Sequence& sequence);
  bool PrepareAhead();
  bool Undisturbed();
  bool StillWanted();
  void FillDrawn(EngineStep* step) const;
  Status ChainAhead(bool* chained);
  Status SampleChained(bool* chained);
  Status EnqueueAhead();
  void GiveUp(EngineStep* step) noexcept;
  void Drain() noexcept;

  // submit.cc
  Status CheckVector(const llmc_request& c) const;
  Status CheckResumed(const llmc_request& c) const;

  // masks.cc: guided requests.
  void AskForFirstMasks(Request* request);
  void CountAsked();
  static bool IsHeld(const Request& request, const Sequence& sequence);
  void TakeMasks(const StepPlan& plan);
  void AwaitMasks();

  // step_inputs.cc: a step's batch and sampling tasks.
  void Prepare(EngineStep* step) const;
  Status EnqueueRows(const EngineStep& step, Fence* fence);
  static void ListTasks(EngineStep* step);

  // results.cc: a step's vectors and tokens.
  void NameOwners();
  void Fork(Sequence* parent);
  bool Stops(const Request& request, int32_t token) const;
  bool ComesTrue(std::size_t task) const;
  void Postprocess();
  void GiveVectors(const float* rows);
  // more: the next token is known already, since it was guessed.
  void AppendToken(Sequence* sequence, const SampleResult& sample, bool more);

  // ranked.cc: requests that rank their continuations.
  Status SetUpRanking(Request* request) const;
  void KeepToken(Sequence* sequence, const SampleResult& sample, bool stop);
  void TakeBest(Sequence* sequence, std::vector<TokenLogprob> best);
  void AdvanceBeams(Request* request);
  void MoveBeams(Request* request, const std::vector<BeamSearch::Move>& moves);
  Sequence* NewBeam(Request* request, const Sequence& parent, std::vector<Sequence*>* spare);
  void TellRanked(Request* request, const std::vector<Transcript>& told);
  void EndUntold(Request* request, const llmc_event& facts);

  // ends.cc
  void Finish(Sequence* sequence, uint32_t reason, const SampleResult* stop);
  void MarkEnded(Request* request);
  void EndRequest(Request* request, uint32_t reason);
  void FailRequest(Request* request, const Status& why);
  void EndAll(Request* request, const llmc_event& facts);
  Status MissOf(const Sequence& sequence, const BucketMiss& miss) const;
  void FailSteps(const Status& why, EngineStep* begun);
  void FailAll(const Status& why);
  void Forget() noexcept;
  void FailAfterOutOfMemory();

  // publish.cc: state that other threads see.
  uint32_t Ready() const;
  void CopyMisses();
  void ListGraphs();
  void FreeLeaving() noexcept;
  void Publish(bool stepped, bool progressed);

  // adapters.cc
  Status CheckMatrices(const std::vector<AdapterMatrix>& matrices) const;
  Status TakeSlot(uint64_t* id, uint32_t* slot);
  Adapter* FindAdapter(uint64_t id);
  void ReleaseAdapter(const Request& request) noexcept;

  // hand_over.cc
  uint32_t MostBlocks(const HandedText& text) const;
  Status ImportStates(uint32_t block, uint64_t parent, const int32_t* tokens, const unsigned char* states);
  bool FindNext(HandedText* text, uint64_t first_block, uint32_t most, std::vector<uint32_t>* found, uint64_t* id);

  // warm_up.cc
  Status CheckGraph(uint32_t graph) const;

  std::unique_ptr<Device> device_;
  const ModelShape& model_;
  EngineOptions options_;
  uint32_t max_length_;  // most tokens of a sequence: the model's limit, or what the KV pool holds if that is less
  BlockManager blocks_;
  Scheduler scheduler_;
  HostSampler host_sampler_;
  Speculator speculator_;

  // Used by the stepping thread only.
  EngineStep step_, ahead_;  // ahead_: planned behind step_
  std::vector<EngineStep> more_;  // the first num_more_ are disjoint steps in flight behind step_, oldest first
  uint32_t num_more_ = 0;
  std::vector<SampleOutcome> outcomes_;  // [task of step_]
  std::vector<Sequence*> owners_;  // [task of step_]
  std::vector<llmc_event> new_events_;
  std::vector<std::unique_ptr<Request>> leaving_;  // ended requests that have rows in a step in flight
  std::vector<Request*> ended_, started_;  // started_: guided requests whose first step this was
  std::vector<Request*> arrived_, cancelled_;
  std::set<std::pair<uint64_t, Request*>> deadlines_;
  struct MaskUpdate {
    TokenMask* mask;
    TokenMask::State state;
    std::vector<int32_t> offered;
  };
  std::vector<MaskUpdate> mask_updates_;
  SwapCosts swap_costs_;
  uint64_t replay_ns_ = 0;  // duration of the last step's replay, but for the time before the step before had ended
  uint64_t landed_ns_ = 0;  // end of the last step
  uint64_t decode_ns_ = 0;  // running mean of the replays of decode steps
  ReplayTime replay_time_;
  Status landed_;  // error of a step that Land ended, which the next Step returns
  bool out_of_memory_ = false;  // memory ran out, and some requests are still to be failed
  RequestMarks marks_;  // taken from any thread
  llmc_engine_stats counters_;
  std::vector<DeviceStat> new_device_stats_;

  std::mutex new_graphs_mutex_;  // locked before step_mutex_
  mutable std::mutex step_mutex_;  // held by Step and CheckIntegrity
  mutable std::mutex mutex_;  // guards the members below
  uint64_t next_id_ = 1, next_adapter_id_ = 1;
  std::unordered_map<uint64_t, Adapter> adapters_;
  uint32_t num_queued_ = 0;  // requests that have not started
  std::condition_variable changed_;  // signals a change of Ready's result, and a mask
  bool runnable_ = false;  // the next step may find work without calls from other threads
  uint64_t next_deadline_ns_ = 0;  // 0: none
  std::vector<Request*> inbox_, cancel_inbox_, mask_inbox_;
  // Masks take memory and time, and a queue may be long. First masks are therefore asked for in order of service, while
  // fewer than kMostAsked continuations have been asked about and not started.
  static constexpr uint32_t kMostAsked = 512;
  uint32_t num_asked_ = 0;
  RowNames row_names_;
  std::set<std::tuple<int32_t, uint64_t, Request*>> unasked_;  // by priority, then age
  std::unordered_map<uint64_t, std::unique_ptr<Request>> live_;
  std::deque<llmc_event> events_;
  llmc_engine_stats stats_{};
  std::vector<DeviceStat> device_stats_;
  std::vector<llmc_graph_stats> graph_stats_;
  StepShapes step_shapes_;
  std::vector<llmc_bucket_miss> bucket_misses_;  // parallel to the scheduler's
  std::vector<llmc_eviction_count> evictions_;
};

}  // namespace llmc
