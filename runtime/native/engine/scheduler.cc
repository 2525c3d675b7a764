#include "engine/scheduler.h"

#include <algorithm>

#include "engine/placed_rows.h"

namespace llmc {
namespace {

// A miss of a load. The graph that serves it is known when the step is planned.
BucketMiss MissOf(Phase phase, const StepLoad& load) {
  return {phase, load.seqs, load.tokens, load.blocks, BucketMiss::kNone, 1};
}

void LongestWaitFirst(std::vector<Sequence*>* sequences) {
  std::stable_sort(sequences->begin(), sequences->end(),
                   [](const Sequence* a, const Sequence* b) { return a->last_step < b->last_step; });
}

}  // namespace

Scheduler::Scheduler(const ModelShape& model, const SchedulerOptions& options, BlockManager* blocks)
    : ladder_(model),
      gives_vectors_(model.vector_width > 0),
      whole_prompts_(model.whole_prompts),
      recurrent_(model.recurrent()),
      options_(options),
      blocks_(blocks),
      block_size_(blocks->block_size()),
      keep_every_((options.keep_every + block_size_ - 1) / block_size_ * block_size_),
      all_seats_(options.max_num_seqs * options.steps_in_flight),
      most_running_(static_cast<size_t>(kSequencesPerSeat) * all_seats_),
      watermark_(std::max(1u, blocks->num_usable() / 100)) {
  leaving_.reserve(most_running_);  // so that leaving allocates nothing
}

// Number of the next `count` tokens that are scored for the prompt's logprobs.
uint32_t Scheduler::NumScores(const Sequence& s, uint32_t count) {
  if (!s.scoring()) return 0;
  const uint32_t end = std::min(s.num_computed + count, s.score_end);
  return end > s.num_scored ? end - s.num_scored : 0;
}

void Scheduler::CountMiss(const BucketMiss& miss) {
  ++num_bucket_misses_;
  for (BucketMiss& m : bucket_misses_) {
    if (m.phase == miss.phase && m.seqs == miss.seqs && m.tokens == miss.tokens && m.blocks == miss.blocks &&
        m.graph == miss.graph) {
      ++m.count;
      return;
    }
  }
  if (bucket_misses_.size() < LLMC_MAX_BUCKET_MISSES) bucket_misses_.push_back(miss);
}

void Scheduler::AddToLoad(StepLoad* load, const Sequence& s, uint32_t count) const {
  load->seqs += 1;
  load->tokens += s.num_again + count;
  load->samples += NumScores(s, count) + (count == s.num_remaining());
  const uint32_t blocks = BlocksFor(s.num_computed + count);
  load->blocks = std::max(load->blocks, blocks);
  load->all_blocks += blocks;
}

StepLoad Scheduler::LoadOf(const std::vector<Sequence*>& sequences) const {
  StepLoad load;
  for (const Sequence* s : sequences) AddToLoad(&load, *s, 1);
  return load;
}

// ---- the life of a sequence ------------------------------------------------------------------------------------

void Scheduler::Add(Sequence* s) {
  s->state = Sequence::State::kWaiting;
  waiting_.insert(s);
  if (!s->started) ++num_unstarted_;
}

void Scheduler::InsertRunning(Sequence* s) {
  s->state = Sequence::State::kRunning;
  running_.insert(std::upper_bound(running_.begin(), running_.end(), s, Before()), s);
}

void Scheduler::Fork(const Sequence& parent, Sequence* child) {
  child->started = true;
  child->guided = parent.guided;
  child->num_cached = parent.num_cached;
  child->last_step = parent.last_step;
  child->promoted = parent.promoted;
  num_promoted_ += child->promoted;
  const bool shares = parent.state == Sequence::State::kRunning;  // not preempted
  if (!shares || NumReady() >= all_seats_ || Crowded()) return Add(child);
  child->num_computed = parent.num_computed;
  child->blocks = parent.blocks;
  child->num_registered = parent.num_registered;
  child->parent_id = parent.parent_id;
  for (uint32_t b : child->blocks) blocks_->Acquire(b);
  if (recurrent_) {
    child->state_slot = states().Take();
    CopyStates(parent.state_slot, child->state_slot);
  }
  InsertRunning(child);
}

void Scheduler::ReleaseBlocks(Sequence* s) {
  for (size_t i = s->blocks.size(); i-- > 0;) blocks_->Release(s->blocks[i]);
  s->blocks.clear();
  if (s->state_slot != 0) states().GiveBack(s->state_slot);
  s->state_slot = 0;
  ReleaseSpare(s);
  s->num_computed = s->num_registered = s->num_again = 0;
  s->parent_id = s->root_id;
}

void Scheduler::Forget(const Sequence& s) {
  for (uint32_t i = s.num_cached / block_size_; i < s.num_registered; ++i) blocks_->Forget(s.blocks[i]);
}

void Scheduler::ForgetSaved(Sequence* s) {
  swap_.blocks.GiveBack(&s->saved);
  swap_.states.GiveBack(&s->saved_state);
  s->num_saved = 0;
}

// The plan's preempted sequences may be gone, so those that wait are asked for its places.
void Scheduler::ForgetSaves(const StepPlan& plan) noexcept {
  if (plan.saves.empty()) return;
  const auto is_saved_now = [&](uint32_t place) {
    return std::any_of(plan.saves.begin(), plan.saves.end(), [&](const auto& save) { return save.to == place; });
  };
  for (Sequence* s : waiting_) {
    if (std::any_of(s->saved.begin(), s->saved.end(), is_saved_now)) ForgetSaved(s);
  }
}

void Scheduler::Remove(Sequence* s) {
  if (s->state == Sequence::State::kWaiting) {
    ForgetSaved(s);
    waiting_.erase(s);
    if (!s->started) --num_unstarted_;
  } else if (s->state == Sequence::State::kRunning) {
    running_.erase(std::find(running_.begin(), running_.end(), s));
    if (s->in_flight > 0) {
      leaving_.push_back(s);
    } else {
      ReleaseBlocks(s);
    }
  }
  num_promoted_ -= s->promoted;
  s->promoted = false;
  s->state = Sequence::State::kDone;
}

void Scheduler::Clear() noexcept {
  waiting_.clear();
  running_.clear();
  leaving_.clear();
  state_copies_.clear();
  num_unstarted_ = num_promoted_ = 0;
  blocks_->Clear();
  swap_.Clear();
}

// Saves blocks to swap space where that is cheaper than recomputing its tokens. Both give the same bits.
void Scheduler::Preempt(Sequence* s) {
  preempted_->push_back(s);
  GoBack(s);
  const uint32_t used = BlocksFor(s->num_computed);
  // Saves come before copies: states that are to be copied first are not there yet.
  const bool stands = std::none_of(state_copies_.begin(), state_copies_.end(),
                                   [s](const StepPlan::Copy& copy) { return copy.to == s->state_slot; });
  if (!s->scoring() && stands && swap_.Pays(used, recurrent_, s->num_computed)) {
    for (uint32_t i = 0; i < used; ++i) {
      s->saved.push_back(swap_.blocks.Take());
      saves_->push_back({s->blocks[i], s->saved.back()});
    }
    if (recurrent_) {
      s->saved_state.push_back(swap_.states.Take());
      state_saves_->push_back({s->state_slot, s->saved_state.back()});
    }
    s->num_saved = s->num_computed;
  }
  running_.erase(std::find(running_.begin(), running_.end(), s));
  ReleaseBlocks(s);
  ++num_preemptions_;
  Add(s);
}

uint32_t Scheduler::NumReady() const {
  return static_cast<uint32_t>(
      std::count_if(running_.begin(), running_.end(), [](const Sequence* s) { return !Parked(*s); }));
}

// The least important sequence that has waited for its mask for kParkedLong steps, or for any time if nothing else
// could run; NULL if none. It is not in the plan.
Sequence* Scheduler::LongParked() const {
  const uint64_t least = num_ready_ == 0 ? 0 : kParkedLong;
  for (size_t i = running_.size(); i-- > 0;) {
    if (Parked(*running_[i]) && step_ - running_[i]->last_step >= least) return running_[i];
  }
  return nullptr;
}

// Whether `parked`, of LongParked, makes room for `s`, which waits. If it came first, it will soon want its room back,
// and computing it again takes as many tokens as it has. So it keeps the room for as many steps, unless nothing runs and
// `s` would not be parked next.
bool Scheduler::GivesWay(const Sequence& parked, const Sequence& s) const {
  if (Before()(&s, &parked) || WaitsFor(parked, s)) return true;
  return step_ - parked.last_step >= std::max<uint64_t>(kParkedLong, parked.num_computed) ||
         (num_ready_ == 0 && !s.guided);
}

// Makes the next token's slot exist and belong to `s` alone. Takes blocks from parked sequences, else from the least
// important one; returns false if that is `s` itself, or is in flight: then `s` waits until it has landed.
bool Scheduler::EnsureWritable(Sequence* s, StepPlan* plan) {
  uint32_t index = s->num_computed / block_size_;
  for (;;) {
    bool append = index == s->blocks.size();
    if (!append && blocks_->ref(s->blocks[index]) == 1) return true;
    uint32_t block = blocks_->Allocate();
    if (block != 0) {
      if (append) {
        s->blocks.push_back(block);
      } else {
        plan->copies.push_back({s->blocks[index], block});
        blocks_->Release(s->blocks[index]);
        s->blocks[index] = block;
      }
      return true;
    }
    Sequence* parked = LongParked();
    Sequence* victim = parked != nullptr ? parked : running_.back();
    if (victim->in_flight > 0) return false;
    Preempt(victim);
    if (victim == s) return false;
  }
}

// ---- planning --------------------------------------------------------------------------------------------------

// Empties a plan and begins the next step.
void Scheduler::NewPlan(StepPlan* plan) {
  *plan = {0,
           false,
           false,
           {},
           std::move(plan->items),
           std::move(plan->saves),
           std::move(plan->copies),
           std::move(plan->loads),
           std::move(plan->state_saves),
           std::move(plan->state_copies),
           std::move(plan->state_loads),
           std::move(plan->preempted),
           {},
           std::move(plan->misses)};
  plan->items.clear();
  for (std::vector<StepPlan::Copy>* copies :
       {&plan->saves, &plan->copies, &plan->loads, &plan->state_saves, &plan->state_copies, &plan->state_loads}) {
    copies->clear();
  }
  swap_.NextStep();
  saves_ = &plan->saves;
  state_saves_ = &plan->state_saves;
  preempted_ = &plan->preempted;
  plan->preempted.clear();
  plan->misses.clear();
  ++step_;
}

// If there are decodes and prefills, a mixed step carries all decodes and a chunk of prefill. Where no mixed graph
// holds that, prefill and decode steps alternate, so that neither starves.
void Scheduler::Schedule(StepPlan* plan) {
  NewPlan(plan);
  KeepPatience();
  awaits_landing_ = false;
  MakeWay();
  if (!awaits_landing_) PlanItems(plan);
  std::swap(plan->state_copies, state_copies_);
  if (plan->miss.count > 0) CountMiss(plan->miss);
}

void Scheduler::PlanItems(StepPlan* plan) {
  TakeSeats();
  const bool has_prefill = !prefills_.empty() || !waiting_.empty();

  PhaseSet phases = kDecodePhases;
  // If decodes left no room for a prefill, the prefill comes first in the next step.
  const bool try_mixed = ladder_.has_mixed() && has_prefill && !decodes_.empty() && !crowded_out_;
  crowded_out_ = false;
  if (try_mixed && PlanMixed(plan)) {
    plan->mixed = plan->prefill;
    crowded_out_ &= !plan->prefill;
  } else {
    const bool prefill_first = has_prefill && (decodes_.empty() || !last_was_prefill_);
    if (prefill_first) AddPrefills(kPrefillPhases, plan);
    if (plan->items.empty() && !decodes_.empty()) phases = PlanDecode(plan);
    if (plan->items.empty() && has_prefill && !prefill_first) AddPrefills(kPrefillPhases, plan);
    crowded_out_ = false;
  }
  last_was_prefill_ = plan->prefill;
  if (!plan->items.empty()) ChooseGraph(phases, plan);
}

bool Scheduler::HasMore() const {
  const auto ready = [](const Sequence* s) { return s->in_flight == 0 && !Parked(*s); };
  return !waiting_.empty() || std::any_of(running_.begin(), running_.end(), ready);
}

// Chooses the sequences that compute something in this step. Steps in flight have equal shares of all. If there are more
// sequences than seats, those that waited longest come first, and the others a step later.
void Scheduler::TakeSeats() {
  ready_.clear();
  decodes_.clear();
  prefills_.clear();
  num_ready_ = 0;
  for (Sequence* s : running_) {
    if (Parked(*s)) continue;
    ++num_ready_;
    if (s->in_flight == 0) ready_.push_back(s);
  }
  const auto all = static_cast<uint32_t>(std::min<size_t>(all_seats_, num_ready_ + waiting_.size()));
  seats_ = std::max(1u, (all + options_.steps_in_flight - 1) / options_.steps_in_flight);
  if (ready_.size() > seats_) {
    LongestWaitFirst(&ready_);
    ready_.resize(seats_);
    std::sort(ready_.begin(), ready_.end(), Before());
  }
  // If the model writes no text, the last token of a prompt is like any other.
  const auto decodes = [this](const Sequence* s) { return s->num_remaining() == 1 && !gives_vectors_; };
  for (Sequence* s : ready_) (decodes(s) ? decodes_ : prefills_).push_back(s);
  if (!recurrent_ || ladder_.Choose(LoadOf(decodes_), kDecodePhases) != kNoGraph) return;
  // Tokens that are computed again have no room beside the decodes: they are chunks of text.
  for (Sequence* s : decodes_) GoBack(s);
  decodes_.clear();
  prefills_.clear();
  for (Sequence* s : ready_) (decodes(s) ? decodes_ : prefills_).push_back(s);
}

void Scheduler::ChooseGraph(PhaseSet phases, StepPlan* plan) const {
  if (plan->prefill) phases = plan->items.front().num_scores > 0 ? kAnyPhase : kPrefillPhases;
  int graph = ladder_.Choose(plan->load, phases);
  if (graph == kNoGraph) graph = ladder_.Choose(plan->load, kAnyPhase);
  plan->graph = static_cast<uint32_t>(graph);
  // A graph that served only a part of the missed load is not named in the miss.
  if (plan->miss.seqs == plan->load.seqs && plan->miss.tokens == plan->load.tokens) plan->miss.graph = graph;
}

void Scheduler::AddItem(Sequence* s, uint32_t count, StepPlan* plan) {
  const uint32_t again = s->num_again;
  plan->items.push_back(
      {s, s->num_computed - again, again + count, count == s->num_remaining(), s->num_scored, NumScores(*s, count)});
  plan->items.back().num_again = again;
  KeepStates(&plan->items.back());
  AddToLoad(&plan->load, *s, count);
  s->last_step = step_;
}

// `chosen` is in running order, so that a victim of EnsureWritable is never in the plan already.
void Scheduler::AddDecodes(const std::vector<Sequence*>& chosen, StepPlan* plan) {
  for (Sequence* s : chosen) {
    if (s->state == Sequence::State::kRunning && EnsureWritable(s, plan)) AddItem(s, 1, plan);
  }
}

// Decodes ride along with prefill chunks if a mixed graph holds all of them and at least one more token. If no prefill
// can be added after all, this is a decode step.
bool Scheduler::PlanMixed(StepPlan* plan) {
  const StepLoad all = LoadOf(decodes_);
  const uint32_t computed = prefills_.empty() ? 0 : prefills_.front()->num_computed;
  if (all.tokens >= budget() || ladder_.Room(all, computed, 2, 1, kMixedPhase) == 0) return false;
  AddDecodes(decodes_, plan);
  if (plan->items.empty()) return false;
  AddPrefills(kMixedPhase, plan);
  return true;
}

// Returns the phases to choose the graph from.
PhaseSet Scheduler::PlanDecode(StepPlan* plan) {
  const StepLoad all = LoadOf(decodes_);
  if (ladder_.Choose(all, kDecodePhases) != kNoGraph) {
    AddDecodes(decodes_, plan);
    return kDecodePhases;
  }
  plan->miss = MissOf(Phase::kDecode, all);
  if (options_.miss_policy == MissPolicy::kError) {
    FailDecodes(plan);
    return kDecodePhases;
  }
  if (options_.miss_policy == MissPolicy::kSplit || ladder_.Choose(all, kAnyPhase) == kNoGraph) {
    return SplitDecodes(plan);
  }
  AddDecodes(decodes_, plan);
  return kAnyPhase;
}

// Fails, in the order of service, sequences that do not fit beside those before them. The next step runs the others.
void Scheduler::FailDecodes(StepPlan* plan) const {
  StepLoad load;
  for (Sequence* s : decodes_) {
    if (HoldsDecode(load, *s, kDecodePhases)) {
      AddToLoad(&load, *s, 1);
    } else {
      plan->misses.push_back(s);
    }
  }
}

// Takes those that fit, longest wait first. A sequence that no decode graph holds alone takes a graph of another phase.
PhaseSet Scheduler::SplitDecodes(StepPlan* plan) {
  PhaseSet phases = kDecodePhases;
  LongestWaitFirst(&decodes_);
  chosen_.clear();
  StepLoad load;
  for (Sequence* s : decodes_) {
    if (chosen_.empty()) phases = HoldsDecode(load, *s, kDecodePhases) ? kDecodePhases : kAnyPhase;
    if (HoldsDecode(load, *s, phases)) {
      AddToLoad(&load, *s, 1);
      chosen_.push_back(s);
    } else if (chosen_.empty()) {
      plan->misses.push_back(s);
    }
  }
  std::sort(chosen_.begin(), chosen_.end(), Before());
  AddDecodes(chosen_, plan);
  return phases;
}

// Adds chunks of running prefills, then of newly admitted sequences, up to the token budget, which decodes of the step
// count against.
void Scheduler::AddPrefills(PhaseSet phases, StepPlan* plan) {
  const auto full = [this, plan] { return plan->load.tokens >= budget() || plan->items.size() >= seats_; };
  for (Sequence* s : prefills_) {
    if (full()) return;
    if (s->state != Sequence::State::kRunning) continue;  // preempted for a decode of this step
    if (ScoresLater(*s, *plan)) return;
    const Chunk chunk = FitChunk(s, s->num_computed, phases, plan);
    if (chunk.fit != Chunk::Fit::kNow) continue;
    AddChunk(s, chunk.count, plan);
    if (chunk.alone) return;
  }
  while (!full() && Admit(phases, plan)) {
  }
}

// A sequence that is being scored runs alone. If others are in the step, it waits and none behind it may overtake.
bool Scheduler::ScoresLater(const Sequence& s, const StepPlan& plan) {
  const bool later = s.scoring() && !plan.items.empty();
  crowded_out_ |= later;
  return later;
}

// Number of tokens of `s` that go into the step, of which the first `computed` are known. A graph of these phases and
// the token budget must hold them beside those in the plan. A chunk that no such graph holds alone is a miss: a graph
// of any phase serves it alone, or it fails.
Scheduler::Chunk Scheduler::FitChunk(Sequence* s, uint32_t computed, PhaseSet phases, StepPlan* plan) {
  const uint32_t remaining = static_cast<uint32_t>(s->tokens.size()) - computed, wanted = remaining - s->held;
  const uint32_t most = std::min(wanted, budget() - plan->load.tokens);
  const bool scoring = s->scoring();
  uint32_t room = scoring ? ladder_.ScoringRoom(computed, s->num_scored, most)
                          : ladder_.Room(plan->load, computed, remaining, most, phases);
  if (whole_prompts_ && room < wanted) room = 0;
  if (room > 0) return {Chunk::Fit::kNow, room, scoring};
  if (!plan->items.empty()) {
    crowded_out_ = true;
    return {Chunk::Fit::kLater, 0, scoring};
  }
  const uint32_t blocks = BlocksFor(computed + wanted);
  plan->miss = MissOf(Phase::kPrefill, {1, wanted, 1, blocks, blocks});
  const bool fails = options_.miss_policy == MissPolicy::kError || scoring || whole_prompts_;
  const uint32_t larger = fails ? 0 : ladder_.Room(plan->load, computed, remaining, wanted, kAnyPhase);
  if (larger > 0) return {Chunk::Fit::kNow, std::min(larger, budget()), true};
  plan->misses.push_back(s);
  return {Chunk::Fit::kNever, 0, scoring};
}

void Scheduler::AddChunk(Sequence* s, uint32_t count, StepPlan* plan) {
  AddItem(s, count, plan);
  plan->prefill = true;
}

// The tokens by which the prefix cache knows a text: rows in place of tokens have names of their contents.
const int32_t* Scheduler::CachedAs(const Sequence& s) {
  if (s.placed == nullptr) return s.tokens.data();
  named_ = s.tokens;
  s.placed->PutNames(static_cast<uint32_t>(named_.size()), named_.data());
  return named_.data();
}

void Scheduler::FindCached(const Sequence& s, uint64_t* id) {
  // The last token is always computed, and so are tokens to be scored.
  const uint32_t most = (s.scoring() ? s.num_scored : static_cast<uint32_t>(s.tokens.size()) - 1) / block_size_;
  blocks_->Lookup(s.root_id, CachedAs(s), most, &hits_, id);
  num_found_ = static_cast<uint32_t>(hits_.size());
  blocks_->CutToState(s.root_id, &hits_, id);
}

// The first waiting sequence with something to compute, its cached blocks in hits_; NULL if none. Skips sequences that
// only wait for a mask, and those that would wait for one after recomputing their tokens.
Sequence* Scheduler::NextWaiting(bool no_held, uint64_t* id) {
  for (Sequence* s : waiting_) {
    if (s->held && (no_held || s->started)) continue;
    FindCached(*s, id);
    if (s->tokens.size() - NumKnown(*s) > s->held) return s;
  }
  return nullptr;
}

// Admits the head of the waiting queue to the step. False if none behind it may overtake: it does not fit, or it runs
// alone.
bool Scheduler::Admit(PhaseSet phases, StepPlan* plan) {
  if (num_ready_ >= all_seats_) return false;
  const bool crowded = Crowded();
  if (crowded && LongParked() == nullptr) return false;
  uint64_t id;
  Sequence* s = NextWaiting(crowded, &id);
  if (s == nullptr || ScoresLater(*s, *plan) || CrowdsDecodes(*s)) return false;
  if (crowded && !GivesWay(*LongParked(), *s)) return false;
  if (!FreeBlocks(*s)) return false;
  const Chunk chunk = FitChunk(s, NumKnown(*s), phases, plan);
  switch (chunk.fit) {
    case Chunk::Fit::kLater: return false;
    case Chunk::Fit::kNever: Remove(s); break;
    case Chunk::Fit::kNow:
      if (Crowded()) Preempt(LongParked());
      StartRunning(s, id, plan);
      AddChunk(s, chunk.count, plan);
      break;
  }
  return !chunk.alone;
}

// Whether all blocks that `s` needs besides hits_ are free, so that a prefill never waits for memory halfway. Takes
// blocks from parked sequences that give way.
bool Scheduler::FreeBlocks(const Sequence& s) {
  const uint32_t need = NumNewBlocks(s);
  for (;;) {
    uint32_t free = blocks_->num_free();
    for (uint32_t b : hits_) free -= blocks_->ref(b) == 0;
    if (free >= need + (running_.empty() ? 0 : watermark_)) return true;
    Sequence* parked = LongParked();
    if (parked == nullptr || !GivesWay(*parked, s)) return false;
    Preempt(parked);
  }
}

// Starts a waiting sequence with hits_, the last of which is the block of `id`, and allocates all its other blocks.
void Scheduler::StartRunning(Sequence* s, uint64_t id, StepPlan* plan) {
  const uint32_t cached = static_cast<uint32_t>(hits_.size()) * block_size_;
  waiting_.erase(s);
  if (!s->started) {
    s->started = true;
    s->num_cached = cached;
    --num_unstarted_;
    if (blocks_->prefix_cache() && !s->scoring()) {
      num_query_tokens_ += s->tokens.size();
      num_hit_tokens_ += cached;
    }
  }
  for (uint32_t b : hits_) blocks_->Acquire(b);
  const uint32_t need = NumNewBlocks(*s);
  s->blocks = hits_;
  for (uint32_t i = 0; i < need; ++i) s->blocks.push_back(blocks_->Allocate());
  for (size_t i = hits_.size(); i < s->saved.size(); ++i) plan->loads.push_back({s->saved[i], s->blocks[i]});
  s->num_computed = NumKnown(*s);
  s->branch = num_found_;
  if (recurrent_) FindStates(s, plan);
  ForgetSaved(s);
  s->num_registered = static_cast<uint32_t>(hits_.size());
  s->parent_id = id;
  InsertRunning(s);
  ++num_ready_;
}

uint32_t Scheduler::Commit(const StepPlan& plan) {
  uint32_t num_ended = 0;
  TakeBack(plan);
  for (const StepItem& item : plan.items) {
    Sequence* s = item.sequence;
    if (s->state == Sequence::State::kDone) {
      ++num_ended;
      continue;
    }
    s->num_computed = item.start + item.count - item.num_guesses;
    s->num_scored += item.num_scores;
    s->num_again = 0;
    RegisterBlocks(s, s->spare_slot != 0 ? 0 : item.keep_tokens);
  }
  return num_ended;
}

void Scheduler::RegisterBlocks(Sequence* s, uint32_t keep_tokens) {
  const uint32_t known = s->num_computed - s->num_again;
  if ((s->num_registered + 1) * block_size_ > known) return;
  const int32_t* all = CachedAs(*s);
  for (; (s->num_registered + 1) * block_size_ <= known; ++s->num_registered) {
    uint32_t& block = s->blocks[s->num_registered];
    const int32_t* tokens = all + static_cast<size_t>(s->num_registered) * block_size_;
    const uint64_t parent = s->parent_id;
    s->parent_id = blocks_->Register(block, parent, tokens, (s->num_registered + 1) * block_size_ == keep_tokens);
    // Blocks behind the last state are computed again. The sequence then holds the cached ones, which else could leave
    // the cache while it runs, and all blocks behind them with them. A step in flight still reads its own.
    if (recurrent_ && s->in_flight == 0) block = blocks_->ExchangeForCached(block, parent, tokens);
  }
}

Status Scheduler::CheckIntegrity() const {
  auto broken = [](const Sequence* s, const char* what) {
    return Status::Error(LLMC_ERR_INTERNAL, "Sequence " + std::to_string(s->output_index) + " of request " +
                                                std::to_string(s->arrival) + " " + what + ".");
  };
  std::vector<uint32_t> refs(blocks_->num_usable() + 1), slots;
  if (running_.size() > most_running_) return broken(running_.back(), "runs beyond what max_num_seqs lets");
  uint32_t unstarted = 0, promoted = 0;
  size_t saved = 0, saved_states = 0;
  for (const Sequence* s : running_) promoted += s->promoted;
  for (const Sequence* s : waiting_) {
    if (s->state != Sequence::State::kWaiting) return broken(s, "is in the waiting queue in another state");
    if (!s->blocks.empty() || s->num_computed != 0) return broken(s, "waits and holds blocks");
    if (s->state_slot != 0) return broken(s, "waits and has a slot of states");
    if (s->saved_state.size() != (recurrent_ && !s->saved.empty() ? 1 : 0)) return broken(s, "has saved other states");
    if (s->saved.size() != BlocksFor(s->num_saved) || s->num_saved > s->tokens.size()) {
      return broken(s, "has saved other blocks than those of its tokens");
    }
    saved += s->saved.size();
    saved_states += s->saved_state.size();
    unstarted += !s->started;
    promoted += s->promoted;
  }
  if (promoted != num_promoted_) return Status::Error(LLMC_ERR_INTERNAL, "The count of promoted sequences is wrong.");
  if (saved != swap_.blocks.num_used() || saved_states != swap_.states.num_used()) {
    return Status::Error(LLMC_ERR_INTERNAL, "The count of saved blocks or states is wrong.");
  }
  if (unstarted != num_unstarted_) return Status::Error(LLMC_ERR_INTERNAL, "The count of new sequences is wrong.");
  for (size_t i = 0; i < running_.size(); ++i) {
    const Sequence* s = running_[i];
    if (s->state != Sequence::State::kRunning) return broken(s, "is in the running list in another state");
    if (i > 0 && !Before()(running_[i - 1], s)) return broken(s, "is out of order in the running list");
    if (s->num_computed >= s->tokens.size() + s->held) return broken(s, "has computed more tokens than it has");
    if (s->scoring() && s->num_computed > s->num_scored) return broken(s, "has passed prompt tokens without a score");
    if (s->blocks.size() < BlocksFor(s->num_computed)) return broken(s, "has too few blocks");
    if (s->blocks.size() > BlocksFor(static_cast<uint32_t>(s->tokens.size()))) return broken(s, "has too many blocks");
    if (s->num_again > s->num_computed) return broken(s, "computes more tokens again than it has computed");
    if (s->spare_slot != 0) return broken(s, "has a second slot of states between steps");
    if ((s->state_slot != 0) != recurrent_) return broken(s, "runs without a slot of states, or needs none");
    if (recurrent_) slots.push_back(s->state_slot);
    for (uint32_t b : s->blocks) {
      if (b == 0 || b >= refs.size()) return broken(s, "refers to a block outside the pool");
      ++refs[b];
    }
  }
  for (const Sequence* s : leaving_) {
    if (s->state != Sequence::State::kDone || s->in_flight == 0) return broken(s, "is leaving and no step holds it");
    for (uint32_t b : s->blocks) ++refs[b];
    if (recurrent_) slots.push_back(s->state_slot);
  }
  return blocks_->CheckIntegrity(refs, slots);
}

}  // namespace llmc
