// Continuous batching: which sequences compute which tokens in the next step, in which graph. Touches no device.
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "device/device.h"
#include "engine/block_manager.h"
#include "engine/graph_ladder.h"
#include "engine/speculation/lookahead.h"
#include "engine/swap_space.h"

namespace llmc {

class PlacedRows;
struct Request;

// One continuation of a request. The KV of tokens[0, num_computed) is in `blocks`. The next token is sampled from the
// last token's logits, so a sequence can sample once all its tokens are computed.
struct Sequence {
  enum class State { kNew, kWaiting, kRunning, kDone };

  Request* request = nullptr;
  int32_t priority = 0;
  bool promoted = false;  // counts as the highest priority; set by the scheduler
  uint64_t arrival = 0;  // the request's id: earlier is smaller
  uint32_t output_index = 0;
  uint32_t num_prompt = 0;
  std::vector<int32_t> tokens;  // prompt, then output
  const PlacedRows* placed = nullptr;  // of its request, in place of tokens of the prompt; nullptr: none
  bool finished = false;        // its last event was sent
  bool guided = false;  // each of its tokens waits for a mask
  // A guided sequence whose next mask is missing: its last token is not computed yet. Or a beam that has to wait for
  // the other beams before its next token.
  bool held = false;
  // Tokens [num_scored, score_end) are still to be scored: their logits are wanted once, even if they are recomputed.
  uint32_t num_scored = 0, score_end = 0;
  std::unique_ptr<Lookahead> lookahead;  // set once its tokens are guessed
  uint32_t task = 0;  // index of the sampling task that draws its next token, in the last step

  // Owned by the scheduler.
  State state = State::kNew;
  bool started = false;
  uint32_t num_computed = 0;
  uint32_t in_flight =
      0;  // tokens behind num_computed in launched steps: the step in flight, and the one enqueued behind it
  uint32_t num_cached = 0;  // tokens found in the prefix cache at the first admission
  std::vector<uint32_t> blocks;
  uint32_t num_registered = 0;  // leading blocks offered to the prefix cache
  uint64_t root_id = BlockManager::kRoot;  // parent of its first block in the prefix cache
  uint64_t parent_id = BlockManager::kRoot;
  uint64_t last_step = 0;
  // While it waits: places of its leading blocks in the swap space, and the number of tokens in them.
  std::vector<uint32_t> saved;
  uint32_t num_saved = 0;
  // Of a recurrent model: the slot of its states, which are those behind its last token in a launched step, but for
  // num_again tokens; 0: it does not run. While it waits with saved blocks, their place in the swap space.
  uint32_t state_slot = 0;
  std::vector<uint32_t> saved_state;
  // Computed tokens that its states lack, since they were guesses: the next step computes them again.
  uint32_t num_again = 0;
  uint32_t spare_slot = 0;  // in a step with guesses, for the states before them; else 0
  // Leading blocks that were cached at the last admission, with a state or not: there, texts branch off.
  uint32_t branch = 0;

  // Call before it computes anything.
  void SetRoot(uint64_t root) { root_id = parent_id = root; }

  uint32_t num_remaining() const { return static_cast<uint32_t>(tokens.size()) - num_computed; }
  bool scoring() const { return num_scored < score_end; }
};

struct StepItem {
  Sequence* sequence;
  uint32_t start, count;  // tokens [start, start + count)
  bool sample;  // the last of them is the sequence's last token
  uint32_t first_score, num_scores;  // tokens to score: their logits are wanted, too
  uint32_t num_guesses = 0;  // trailing tokens that are guesses: logits of each, and of the token before, are wanted
  uint32_t keep_tokens = 0, keep_slot = 0;  // behind so many tokens, the states also go to a slot; 0: they do not
  uint32_t num_again = 0;  // leading tokens that are computed again, for the states behind them

  // Whether it computes one new token, guesses aside.
  bool decodes() const { return count == num_again + 1 + num_guesses; }
};

// What a sequence does in the step behind the one in flight.
enum class Continues {
  kWithToken,  // computes one token, and draws the next one
  kEnds,  // nothing: the step in flight draws its last token
  kUnsure,  // depends on the token that the step in flight draws
};

enum class MissPolicy : uint32_t { kLarger, kSplit, kError };

// A load that no graph of its phase holds; graph: the one that served it; count: how often it came.
struct BucketMiss {
  static constexpr int32_t kNone = -1;  // split, or failed
  Phase phase = Phase::kPrefill;
  uint32_t seqs = 0, tokens = 0, blocks = 0;
  int32_t graph = kNone;
  uint64_t count = 0;
};

// Number of sequences of a priority that made way for waiting ones of a higher priority.
struct EvictionCount {
  int32_t priority = 0;
  uint64_t count = 0;
};

struct StepPlan {
  uint32_t graph = 0;
  bool prefill = false;  // has an item that is not a decode
  bool mixed = false;  // has decodes, too
  StepLoad load;  // of all items
  std::vector<StepItem> items;
  struct Copy {
    uint32_t from, to;
  };
  // Copies before the replay, in this order: from blocks to swap space, between blocks, from swap space to blocks.
  std::vector<Copy> saves, copies, loads;
  std::vector<Copy> state_saves, state_copies, state_loads;  // the same for slots of states
  bool copies_nothing() const {
    return saves.empty() && copies.empty() && loads.empty() && state_saves.empty() && state_copies.empty() &&
           state_loads.empty();
  }
  std::vector<const Sequence*> preempted;  // sequences preempted for this plan
  BucketMiss miss;  // this step's miss; count 0: none
  std::vector<Sequence*> misses;  // sequences that no graph may run: the engine must fail them
  bool guessing = false;  // sequences end in guesses now
};

struct SchedulerOptions {
  uint32_t max_num_seqs = 1;
  uint32_t max_tokens_per_step = 0;  // most tokens of a step with prefill; 0: the largest prefill or mixed graph
  MissPolicy miss_policy = MissPolicy::kLarger;
  uint32_t steps_in_flight = 1;  // most at a time; of several, no two have a sequence in common
  uint32_t patience = kDefaultPatience;  // steps that a request may wait behind higher priorities, see KeepPatience
  static constexpr uint32_t kDefaultPatience = 512;
  // Tokens between the states that are kept of a long text, of a recurrent model. A kept one is written beside those that
  // a step writes anyway, so it costs little time but a slot.
  uint32_t keep_every = kKeepEvery;
  static constexpr uint32_t kKeepEvery = 256;
};

class Scheduler {
 public:
  Scheduler(const ModelShape& model, const SchedulerOptions& options, BlockManager* blocks);

  // A new sequence joins the waiting queue.
  void Add(Sequence* sequence);
  // `child` continues `parent`, which has computed all of child->tokens, and shares its blocks copy-on-write. If no
  // running slot is free, it waits and is recomputed, which the prefix cache makes cheap.
  void Fork(const Sequence& parent, Sequence* child);
  // Removes from the prefix cache the blocks that the sequence computed, not those that it found there.
  void Forget(const Sequence& sequence);
  // Releases the blocks of a sequence that is finished, cancelled or failed.
  void Remove(Sequence* sequence);

  // Whether plans may use a graph; all are on at first. Loads that only a graph that is off holds are misses.
  void Enable(uint32_t graph, bool on) { ladder_.Enable(graph, on); }
  bool Enabled(uint32_t graph) const { return ladder_.Enabled(graph); }
  // Host memory for the blocks of preempted sequences.
  SwapSpace* swap() { return &swap_; }
  // The model has more graphs than before; the new ones are off.
  void TakeNewGraphs() { ladder_.TakeNewGraphs(); }

  // Plans a step of sequences that no step in flight has.
  void Schedule(StepPlan* plan);
  // Whether Schedule may find something to compute beside the steps in flight.
  bool HasMore() const;
  // Plans the step behind the one in flight (plan_ahead.cc) if that plan is certain; else returns false and changes
  // nothing. A plan that is dropped leaves nothing to undo.
  bool PlanAhead(Continues (*how)(const Sequence&), StepPlan* plan);
  // The plan's replay is in flight from now on.
  void Launch(const StepPlan& plan);
  // The plan's replay failed or is not wanted any more.
  void Abandon(const StepPlan& plan) noexcept { TakeBack(plan); }
  // What the plan saved may not have reached the swap space: it is to be computed again.
  void ForgetSaves(const StepPlan& plan) noexcept;
  // Copies of states that the next plan would have. The caller does them.
  std::vector<StepPlan::Copy> TakeStateCopies() { return std::exchange(state_copies_, {}); }
  // Running sequences whose states the plan copies, in the plan or not. They may be wrong if its step failed.
  void AddCopied(const StepPlan& plan, std::vector<Request*>* requests) const;
  // Drops all sequences and blocks, in whatever state it is, and clears the prefix cache. The sequences may be freed
  // already.
  void Clear() noexcept;
  // The plan's replay succeeded: its tokens are in the KV cache. Returns how many of its sequences ended meanwhile.
  uint32_t Commit(const StepPlan& plan);

  bool recurrent() const { return recurrent_; }
  // Guesses behind the decodes of a step: speculation/guess_rows.cc.
  // Rows that some graph has for guesses, beside the rows of the plan.
  uint32_t GuessRoom(const StepPlan& plan) const;
  // Most tokens of a sequence in graphs for a step with guesses.
  uint64_t GuessReach(const StepPlan& plan) const { return ladder_.LongestReach(GuessPhases(plan)); }
  // Returns how many were added.
  uint32_t AddGuesses(const int32_t* guesses, uint32_t count, StepItem* item, StepPlan* plan);
  bool ChooseForGuesses(StepPlan* plan);
  // Removes the guesses that sequences end in, if any; the plan keeps its items.
  static void DropGuesses(StepPlan* plan) noexcept;
  // The first guess behind the computed tokens was right: its token belongs to the sequence.
  void KeepGuess(Sequence* s);
  // Right guesses have been kept: finds the states behind the sequence's tokens.
  void SettleStates(const StepItem& item);
  // Releases the blocks of guesses that were wrong.
  void TrimBlocks(Sequence* s);

  const std::vector<Sequence*>& running() const { return running_; }
  uint32_t num_running() const { return static_cast<uint32_t>(running_.size()); }
  uint32_t num_waiting() const { return static_cast<uint32_t>(waiting_.size()); }
  uint32_t num_unstarted() const { return num_unstarted_; }
  uint64_t num_preemptions() const { return num_preemptions_; }
  // Preemptions for waiting sequences of a higher priority.
  uint64_t num_evictions() const { return num_evictions_; }
  // Evictions by priority, for the first LLMC_MAX_EVICTED_PRIORITIES priorities that made way.
  const std::vector<EvictionCount>& evictions() const { return evictions_; }
  // Requests that were promoted to the highest priority.
  uint64_t num_promotions() const { return num_promotions_; }
  uint64_t num_bucket_misses() const { return num_bucket_misses_; }
  // The first LLMC_MAX_BUCKET_MISSES shapes that missed.
  const std::vector<BucketMiss>& bucket_misses() const { return bucket_misses_; }
  // Prompt tokens looked up in the prefix cache at the first admission, and those found.
  uint64_t num_query_tokens() const { return num_query_tokens_; }
  uint64_t num_hit_tokens() const { return num_hit_tokens_; }
  Status CheckIntegrity() const;

 private:
  static bool Outranks(const Sequence& a, const Sequence& b) {
    return a.promoted != b.promoted ? a.promoted : a.priority < b.priority;
  }
  // Order of service: lower priority values first, then age. Preemption takes from the other end.
  struct Before {
    bool operator()(const Sequence* a, const Sequence* b) const {
      if (a->promoted != b->promoted) return a->promoted;
      if (a->priority != b->priority) return a->priority < b->priority;
      if (a->arrival != b->arrival) return a->arrival < b->arrival;
      return a->output_index < b->output_index;
    }
  };
  // What becomes of a prefill in a step.
  struct Chunk {
    enum class Fit {
      kNow,  // its next `count` tokens run
      kLater,  // the step is full
      kNever,  // no graph may run it: it fails
    };
    Fit fit = Fit::kNow;
    uint32_t count = 0;
    bool alone = false;  // nothing else rides along
  };
  // Sequences that may hold blocks, for each seat of a step in flight: those that wait for masks are parked.
  static constexpr uint32_t kSequencesPerSeat = 2;
  // Steps before a parked sequence may lose its blocks: masks usually come within two, and recomputing costs more.
  static constexpr uint64_t kParkedLong = 2;

  void NewPlan(StepPlan* plan);
  void PlanItems(StepPlan* plan);
  void TakeBack(const StepPlan& plan) noexcept;
  bool SomebodyComes();
  // Most tokens of a step with prefill.
  uint32_t budget() const {
    return options_.max_tokens_per_step == 0 ? ladder_.largest_step() : options_.max_tokens_per_step;
  }
  bool HoldsDecode(const StepLoad& load, const Sequence& s, PhaseSet phases) const {
    StepLoad with_again = load;
    with_again.tokens += s.num_again;
    return ladder_.Room(with_again, s.num_computed, 1, 1, phases) > 0;
  }
  static uint32_t NumScores(const Sequence& s, uint32_t count);
  static PhaseSet GuessPhases(const StepPlan& plan) { return plan.mixed ? kPrefillPhases : kDecodePhases; }
  void CountMiss(const BucketMiss& miss);
  void ChooseGraph(PhaseSet phases, StepPlan* plan) const;
  uint32_t BlocksFor(uint32_t tokens) const { return (tokens + block_size_ - 1) / block_size_; }
  void AddToLoad(StepLoad* load, const Sequence& s, uint32_t count) const;
  StepLoad LoadOf(const std::vector<Sequence*>& sequences) const;

  // Whether a running sequence waits only for its mask or for other beams. It keeps its blocks, but needs no seat.
  static bool Parked(const Sequence& s) { return s.held && s.num_remaining() <= 1 && s.in_flight == 0; }
  // Whether `parked` waits for `s`, another beam of its request.
  static bool WaitsFor(const Sequence& parked, const Sequence& s) {
    return parked.num_remaining() == 0 && parked.arrival == s.arrival;
  }
  uint32_t NumReady() const;
  // Whether a sequence can be admitted only in place of a parked one.
  bool Crowded() const { return running_.size() >= most_running_ || (recurrent_ && states().num_available() == 0); }
  StateSlots& states() { return blocks_->states(); }
  const StateSlots& states() const { return blocks_->states(); }
  Sequence* LongParked() const;
  bool GivesWay(const Sequence& parked, const Sequence& s) const;
  void TakeSeats();
  void AddItem(Sequence* s, uint32_t count, StepPlan* plan);
  void AddDecodes(const std::vector<Sequence*>& chosen, StepPlan* plan);
  bool PlanMixed(StepPlan* plan);
  PhaseSet PlanDecode(StepPlan* plan);
  PhaseSet SplitDecodes(StepPlan* plan);
  void FailDecodes(StepPlan* plan) const;
  void AddPrefills(PhaseSet phases, StepPlan* plan);
  bool ScoresLater(const Sequence& s, const StepPlan& plan);
  Chunk FitChunk(Sequence* s, uint32_t computed, PhaseSet phases, StepPlan* plan);
  void AddChunk(Sequence* s, uint32_t count, StepPlan* plan);
  // Looks up cached blocks into hits_, up to one with a state where a model is recurrent; *id as in BlockManager::Lookup.
  void FindCached(const Sequence& s, uint64_t* id);
  const int32_t* CachedAs(const Sequence& s);
  Sequence* NextWaiting(bool no_held, uint64_t* id);
  bool Admit(PhaseSet phases, StepPlan* plan);
  // Blocks that a waiting sequence needs besides the cached blocks in hits_.
  uint32_t NumNewBlocks(const Sequence& s) const {
    return BlocksFor(static_cast<uint32_t>(s.tokens.size())) - static_cast<uint32_t>(hits_.size());
  }
  bool FreeBlocks(const Sequence& s);
  void StartRunning(Sequence* s, uint64_t id, StepPlan* plan);
  bool EnsureWritable(Sequence* s, StepPlan* plan);
  void Preempt(Sequence* s);
  // kept_states.cc: states of a recurrent model.
  void CopyStates(uint32_t from, uint32_t to) {
    if (from != to) state_copies_.push_back({from, to});
  }
  void FindStates(Sequence* s, StepPlan* plan);
  void KeepStates(StepItem* item);
  uint32_t TokensToKeep(const Sequence& s, uint32_t start, uint32_t end) const;
  uint32_t KeepBeforeGuesses(uint32_t count, StepItem* item);
  void ReleaseSpare(Sequence* s);
  // The states of the sequence, not its keys and values, say how many tokens it has computed.
  static void GoBack(Sequence* s) { s->num_computed -= std::exchange(s->num_again, 0); }
  // eviction.cc: priorities.
  void MakeWay();
  bool ChooseVictims(const Sequence& s, const StepLoad& claimed, const StepLoad& coming);
  bool DecodesFit(const std::vector<Sequence*>& sequences, const StepLoad& coming) const;
  bool CrowdsDecodes(const Sequence& s) const;
  void Evict(Sequence* victim);
  void KeepPatience();
  void Promote(uint64_t arrival);
  // Leading tokens of a waiting sequence that need no computing: in hits_, or in the swap space if that has more.
  uint32_t NumKnown(const Sequence& s) const {
    return std::max(static_cast<uint32_t>(hits_.size()) * block_size_, s.num_saved);
  }
  void ForgetSaved(Sequence* s);
  void ReleaseBlocks(Sequence* s);
  // keep_tokens: behind which a step has kept the states; 0: nowhere.
  void RegisterBlocks(Sequence* s, uint32_t keep_tokens = 0);
  void InsertRunning(Sequence* s);

  GraphLadder ladder_;
  bool gives_vectors_, whole_prompts_, recurrent_;
  SchedulerOptions options_;
  BlockManager* blocks_;
  SwapSpace swap_;
  std::vector<StepPlan::Copy>*saves_ = nullptr, *state_saves_ = nullptr;  // of the plan in the making
  std::vector<const Sequence*>* preempted_ = nullptr;  // of the plan in the making
  std::vector<StepPlan::Copy> state_copies_;  // of forks: for the next plan
  uint32_t block_size_, keep_every_;
  uint32_t all_seats_;  // of all steps in flight
  size_t most_running_;
  uint32_t watermark_;
  bool last_was_prefill_ = false;
  bool crowded_out_ = false;  // the last step was to be mixed, but its decodes left no room for a prefill
  uint64_t step_ = 0, num_preemptions_ = 0, num_bucket_misses_ = 0, num_query_tokens_ = 0, num_hit_tokens_ = 0;
  uint64_t num_evictions_ = 0, num_promotions_ = 0, contested_ = 0;
  uint32_t num_promoted_ = 0;  // sequences
  uint32_t num_unstarted_ = 0;
  uint32_t num_ready_ = 0;  // running sequences that have tokens to compute or are in flight, in this Schedule
  uint32_t seats_ = 0;  // most sequences of the step, in this Schedule
  bool awaits_landing_ = false;  // a sequence in flight is to make way, in this Schedule
  std::set<Sequence*, Before> waiting_;
  std::vector<Sequence*> running_;  // sorted by Before
  std::vector<Sequence*> leaving_;  // ended sequences whose blocks a step in flight writes to
  std::vector<Sequence*> ready_, decodes_, prefills_, chosen_, victims_;  // scratch of one Schedule
  std::vector<uint32_t> hits_;
  std::vector<int32_t> named_;  // scratch of CachedAs
  uint32_t num_found_ = 0;  // of the last lookup: cached blocks, of which hits_ are those up to a state
  std::vector<BucketMiss> bucket_misses_;
  std::vector<EvictionCount> evictions_;
};

}  // namespace llmc
