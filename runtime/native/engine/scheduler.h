// Continuous batching: which sequences compute which tokens in the next step, in which graph. Touches no device.
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>
#include <set>
#include <vector>

#include "device/device.h"
#include "engine/block_manager.h"
#include "engine/graph_ladder.h"
#include "engine/speculation/lookahead.h"
#include "engine/swap_space.h"

namespace llmc {

struct Request;

// One continuation of a request. tokens[0, num_computed) have their KV in `blocks`; the logits of the last token are
// what the next token is sampled from, so a sequence is ready to sample when it has computed all its tokens.
struct Sequence {
  enum class State { kNew, kWaiting, kRunning, kDone };

  Request* request = nullptr;
  int32_t priority = 0;
  bool promoted = false;  // it counts as the highest priority; the scheduler says so
  uint64_t arrival = 0;  // the request's id: earlier is smaller
  uint32_t output_index = 0;
  uint32_t num_prompt = 0;
  std::vector<int32_t> tokens;  // prompt, then output
  bool finished = false;        // its last event was sent
  // Guided, and the mask of its next token is missing: its last token waits. Or a beam: what follows its last token waits
  // for the other beams.
  bool held = false;
  // The logits after tokens [num_scored, score_end) are still wanted, once, whatever is recomputed later.
  uint32_t num_scored = 0, score_end = 0;
  std::unique_ptr<Lookahead> lookahead;  // once its tokens are guessed
  uint32_t task = 0;  // of the last step that draws its next token, which one does

  // Owned by the scheduler.
  State state = State::kNew;
  bool started = false;
  uint32_t num_computed = 0;
  uint32_t in_flight =
      0;  // tokens behind num_computed whose step is on its way, and one more where another is behind it
  uint32_t num_cached = 0;  // tokens found in the prefix cache at the first admission
  std::vector<uint32_t> blocks;
  uint32_t num_registered = 0;  // leading blocks offered to the prefix cache
  uint64_t root_id = BlockManager::kRoot;  // what its blocks begin behind in the prefix cache
  uint64_t parent_id = BlockManager::kRoot;
  uint64_t last_step = 0;
  // While it waits: the places of its leading blocks in the host's memory, and how many tokens these have.
  std::vector<uint32_t> saved;
  uint32_t num_saved = 0;

  // Before it computes anything.
  void SetRoot(uint64_t root) { root_id = parent_id = root; }

  uint32_t num_remaining() const { return static_cast<uint32_t>(tokens.size()) - num_computed; }
  bool scoring() const { return num_scored < score_end; }
};

struct StepItem {
  Sequence* sequence;
  uint32_t start, count;  // tokens [start, start + count)
  bool sample;  // the last of them is the sequence's last token
  uint32_t first_score, num_scores;  // the logits after these tokens are wanted, too
  uint32_t num_guesses = 0;  // the last tokens are guesses: the logits after each are wanted, and the one before them
};

// What a sequence does in the step behind one that is on its way.
enum class Continues {
  kWithToken,  // computes one token, and draws the next one
  kEnds,  // nothing: the token that is drawn now is its last
  kUnsure,  // that depends on what is drawn now
};

enum class MissPolicy : uint32_t { kLarger, kSplit, kError };

// A load that no graph of its phase holds, what served it, and how often it came.
struct BucketMiss {
  static constexpr int32_t kNone = -1;  // split, or failed
  Phase phase = Phase::kPrefill;
  uint32_t seqs = 0, tokens = 0, blocks = 0;
  int32_t graph = kNone;
  uint64_t count = 0;
};

// Sequences of a priority that made way for waiting ones of a higher priority.
struct EvictionCount {
  int32_t priority = 0;
  uint64_t count = 0;
};

struct StepPlan {
  uint32_t graph = 0;
  bool prefill = false;  // has an item that is not a decode
  bool mixed = false;  // has both
  StepLoad load;  // of all items
  std::vector<StepItem> items;
  struct Copy {
    uint32_t from, to;
  };
  // In this order, before the replay: blocks to places of the host's memory, blocks to blocks, places to blocks.
  std::vector<Copy> saves, copies, loads;
  std::vector<const Sequence*> preempted;  // for this plan
  BucketMiss miss;  // of this step, count 0: none
  std::vector<Sequence*> misses;  // no graph may run these: the engine must fail them
  bool guessing = false;  // sequences end in guesses now
};

struct SchedulerOptions {
  uint32_t max_num_seqs = 1;
  uint32_t max_tokens_per_step = 0;  // of a step with prefill; 0: the largest prefill or mixed graph
  MissPolicy miss_policy = MissPolicy::kLarger;
  uint32_t patience = kDefaultPatience;  // steps that a request may wait behind higher priorities, see KeepPatience
  static constexpr uint32_t kDefaultPatience = 512;
};

class Scheduler {
 public:
  Scheduler(const ModelShape& model, const SchedulerOptions& options, BlockManager* blocks);

  // A new sequence joins the waiting queue.
  void Add(Sequence* sequence);
  // `child` continues `parent`, which has computed all of child->tokens: shares its blocks, copy-on-write. When no
  // running slot is free it waits and is computed again (the prefix cache makes that cheap).
  void Fork(const Sequence& parent, Sequence* child);
  // What the sequence computed, other than found, leaves the prefix cache.
  void Forget(const Sequence& sequence);
  // The sequence is finished, cancelled or failed; its blocks are released.
  void Remove(Sequence* sequence);

  // Whether plans may use a graph; all are on at first. What needs a graph that is off misses.
  void Enable(uint32_t graph, bool on) { ladder_.Enable(graph, on); }
  bool Enabled(uint32_t graph) const { return ladder_.Enabled(graph); }
  // Preempted sequences may keep their blocks there.
  SwapSpace* swap() { return &swap_; }
  // The model has more graphs than before; the new ones are off.
  void TakeNewGraphs() { ladder_.TakeNewGraphs(); }

  void Schedule(StepPlan* plan);
  // The same behind a step that is on its way (plan_ahead.cc), where its plan is certain; else false, and nothing has
  // changed. A plan that is dropped leaves nothing to undo.
  bool PlanAhead(Continues (*how)(const Sequence&), StepPlan* plan);
  // The plan's replay is on its way.
  void Launch(const StepPlan& plan);
  // It failed, or nobody asks for it any more.
  void Abandon(const StepPlan& plan) noexcept { TakeBack(plan); }
  // Holds no sequence and no block from now on, whatever state it is in; forgets the prefix cache. The sequences may be
  // gone already.
  void Clear() noexcept;
  // The plan's replay succeeded: its tokens are in the cache. Returns how many of its sequences had ended meanwhile.
  uint32_t Commit(const StepPlan& plan);

  // Guesses behind the decodes of a step (speculation/guess_rows.cc). Rows that some graph has beside those of the plan,
  // and tokens of a sequence that graphs for such a step can hold.
  uint32_t GuessRoom(const StepPlan& plan) const;
  uint64_t GuessReach(const StepPlan& plan) const { return ladder_.LongestReach(GuessPhases(plan)); }
  // How many were added.
  uint32_t AddGuesses(const int32_t* guesses, uint32_t count, StepItem* item, StepPlan* plan);
  bool ChooseForGuesses(StepPlan* plan);
  // Sequences end in what is known again; the plan stays. Nothing where they do already.
  static void DropGuesses(StepPlan* plan) noexcept;
  // The first guess behind what is computed was right, and its token is the sequence's.
  void KeepGuess(Sequence* s);
  // Gives back the blocks of guesses that were wrong.
  void TrimBlocks(Sequence* s);

  uint32_t num_running() const { return static_cast<uint32_t>(running_.size()); }
  uint32_t num_waiting() const { return static_cast<uint32_t>(waiting_.size()); }
  uint32_t num_unstarted() const { return num_unstarted_; }
  uint64_t num_preemptions() const { return num_preemptions_; }
  // Of the preemptions, those for waiting sequences of a higher priority; the first LLMC_MAX_EVICTED_PRIORITIES
  // priorities that made way.
  uint64_t num_evictions() const { return num_evictions_; }
  const std::vector<EvictionCount>& evictions() const { return evictions_; }
  // Requests that came to count as the highest priority.
  uint64_t num_promotions() const { return num_promotions_; }
  uint64_t num_bucket_misses() const { return num_bucket_misses_; }
  // The first LLMC_MAX_BUCKET_MISSES shapes that missed.
  const std::vector<BucketMiss>& bucket_misses() const { return bucket_misses_; }
  // Prompt tokens looked up in the prefix cache at the first admission, and found.
  uint64_t num_query_tokens() const { return num_query_tokens_; }
  uint64_t num_hit_tokens() const { return num_hit_tokens_; }
  Status CheckIntegrity() const;

 private:
  static bool Outranks(const Sequence& a, const Sequence& b) {
    return a.promoted != b.promoted ? a.promoted : a.priority < b.priority;
  }
  // Lower priority values first, then age: the order of service; preemption takes from the other end.
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
  // A step has max_num_seqs seats. So many sequences for each seat may hold blocks: those that wait for masks park.
  static constexpr uint32_t kSequencesPerSeat = 2;
  // A mask that comes within a step or two is the usual case: losing blocks for that would cost more than it brings.
  static constexpr uint64_t kParkedLong = 2;

  void NewPlan(StepPlan* plan);
  void TakeBack(const StepPlan& plan) noexcept;
  bool SomebodyComes();
  // Tokens of a step with prefill.
  uint32_t budget() const {
    return options_.max_tokens_per_step == 0 ? ladder_.largest_step() : options_.max_tokens_per_step;
  }
  bool HoldsDecode(const StepLoad& load, const Sequence& s, PhaseSet phases) const {
    return ladder_.Room(load, s.num_computed, 1, 1, phases) > 0;
  }
  static uint32_t NumScores(const Sequence& s, uint32_t count);
  static PhaseSet GuessPhases(const StepPlan& plan) { return plan.mixed ? kPrefillPhases : kDecodePhases; }
  void CountMiss(const BucketMiss& miss);
  void ChooseGraph(PhaseSet phases, StepPlan* plan) const;
  uint32_t BlocksFor(uint32_t tokens) const { return (tokens + block_size_ - 1) / block_size_; }
  void AddToLoad(StepLoad* load, const Sequence& s, uint32_t count) const;
  StepLoad LoadOf(const std::vector<Sequence*>& sequences) const;

  // A running sequence that only waits for its mask, or for other beams. It keeps its blocks, and its seat in the step is
  // free.
  static bool Parked(const Sequence& s) { return s.held && s.num_remaining() <= 1; }
  // It waits for `s`, another beam of its request.
  static bool WaitsFor(const Sequence& parked, const Sequence& s) {
    return parked.num_remaining() == 0 && parked.arrival == s.arrival;
  }
  uint32_t NumReady() const;
  // Who is admitted now takes the place of one that is parked.
  bool Crowded() const { return running_.size() >= most_running_; }
  Sequence* LongParked() const;
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
  // Into hits_; *id as of BlockManager::Lookup.
  void FindCached(const Sequence& s, uint64_t* id);
  Sequence* NextWaiting(bool no_held, uint64_t* id);
  bool Admit(PhaseSet phases, StepPlan* plan);
  // Of a waiting sequence, besides the cached blocks in hits_.
  uint32_t NumNewBlocks(const Sequence& s) const {
    return BlocksFor(static_cast<uint32_t>(s.tokens.size())) - static_cast<uint32_t>(hits_.size());
  }
  bool FreeBlocks(const Sequence& s);
  void StartRunning(Sequence* s, uint64_t id, StepPlan* plan);
  bool EnsureWritable(Sequence* s, StepPlan* plan);
  void Preempt(Sequence* s);
  // Priorities: eviction.cc.
  void MakeWay();
  bool ChooseVictims(const Sequence& s, const StepLoad& claimed, const StepLoad& coming);
  bool DecodesFit(const std::vector<Sequence*>& sequences, const StepLoad& coming) const;
  bool CrowdsDecodes(const Sequence& s) const;
  void Evict(Sequence* victim);
  void KeepPatience();
  void Promote(uint64_t arrival);
  // Tokens that a waiting sequence begins with: those of hits_, or more that were saved.
  uint32_t NumKnown(const Sequence& s) const {
    return std::max(static_cast<uint32_t>(hits_.size()) * block_size_, s.num_saved);
  }
  void ForgetSaved(Sequence* s);
  void ReleaseBlocks(Sequence* s);
  void RegisterBlocks(Sequence* s);
  void InsertRunning(Sequence* s);

  GraphLadder ladder_;
  bool gives_vectors_, whole_prompts_;
  SchedulerOptions options_;
  BlockManager* blocks_;
  SwapSpace swap_;
  std::vector<StepPlan::Copy>* saves_ = nullptr;  // of the plan that is being made
  std::vector<const Sequence*>* preempted_ = nullptr;  // of the same
  uint32_t block_size_;
  size_t most_running_;
  uint32_t watermark_;
  bool last_was_prefill_ = false;
  bool crowded_out_ = false;  // the last step was to be mixed, and what it carried left no room for a prefill
  uint64_t step_ = 0, num_preemptions_ = 0, num_bucket_misses_ = 0, num_query_tokens_ = 0, num_hit_tokens_ = 0;
  uint64_t num_evictions_ = 0, num_promotions_ = 0, contested_ = 0;
  uint32_t num_promoted_ = 0;  // sequences
  uint32_t num_unstarted_ = 0;
  uint32_t num_ready_ = 0;  // running sequences that have something to compute, of this Schedule
  std::set<Sequence*, Before> waiting_;
  std::vector<Sequence*> running_;  // sorted by Before
  std::vector<Sequence*> leaving_;  // have ended, and a step on its way writes to their blocks
  std::vector<Sequence*> ready_, decodes_, prefills_, chosen_, victims_;  // scratch of one Schedule
  std::vector<uint32_t> hits_;
  std::vector<BucketMiss> bucket_misses_;
  std::vector<EvictionCount> evictions_;
};

}  // namespace llmc
