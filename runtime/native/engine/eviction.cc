// Scheduler, continued: waiting sequences of a higher priority take the place of running ones of a lower one. None
// waits behind higher ones for ever.
#include <algorithm>
#include <unordered_map>

#include "engine/scheduler.h"

namespace llmc {
namespace {

// Counts blocks that become free as sequences release theirs, one sequence after another.
class Ransom {
 public:
  // kept: cached blocks that are no gain, since the sequence to be admitted begins with them.
  Ransom(const BlockManager& blocks, const std::vector<uint32_t>& kept) : blocks_(blocks) {
    for (uint32_t b : kept) given_up_[b] = kKept;
  }

  uint32_t Add(const Sequence& s) {
    uint32_t freed = 0;
    for (uint32_t b : s.blocks) {
      uint32_t& times = given_up_[b];
      if (times != kKept) freed += ++times == blocks_.ref(b);
    }
    return freed;
  }

 private:
  static constexpr uint32_t kKept = UINT32_MAX;
  const BlockManager& blocks_;
  std::unordered_map<uint32_t, uint32_t> given_up_;  // block: references given up
};

// Adds a decode of a sequence that has `blocks` blocks.
void AddDecode(uint32_t blocks, StepLoad* load) {
  load->tokens = load->samples = ++load->seqs;
  load->blocks = std::max(load->blocks, blocks);
  load->all_blocks += blocks;
}

}  // namespace

// Evicts before a step is planned, so that no victim is in it. Goes in the order of service and counts the room of
// those before: none overtakes one that does not fit.
void Scheduler::MakeWay() {
  StepLoad claimed;  // blocks of the pool
  StepLoad coming;   // decodes of a later step
  for (Sequence* s : waiting_) {
    if (running_.empty() || !Outranks(*s, *running_.back())) return;
    if (s->held) continue;  // could not use a place
    uint64_t id;
    FindCached(*s, &id);
    const uint32_t length = static_cast<uint32_t>(s->tokens.size());
    AddDecode(BlocksFor(length + 1), &coming);
    if (!ChooseVictims(*s, claimed, coming)) return;
    for (Sequence* victim : victims_) Evict(victim);
    claimed.seqs += 1;
    claimed.tokens += length - static_cast<uint32_t>(hits_.size()) * block_size_;
    claimed.blocks += BlocksFor(length);
    if (claimed.tokens >= budget()) return;  // the others are not for this step
  }
}

// Chooses victims_: the fewest sequences outranked by `s`, lowest priority and youngest first, without which `s` can be
// admitted beside `claimed`. False if that is impossible, or has to wait for a victim in flight: then nothing is evicted.
// No step is planned meanwhile, since it might take another victim along.
bool Scheduler::ChooseVictims(const Sequence& s, const StepLoad& claimed, const StepLoad& coming) {
  victims_.clear();
  chosen_ = running_;  // sequences that stay
  Ransom ransom(*blocks_, hits_);
  uint32_t free = blocks_->num_free();
  for (uint32_t b : hits_) free -= blocks_->ref(b) == 0;
  const uint32_t need = NumNewBlocks(s) + claimed.blocks;
  const bool decodes = DecodesFit({}, coming);  // if false, no eviction can change it
  bool in_flight = false;  // a victim is
  for (size_t i = running_.size();; --i) {
    const uint32_t busy = static_cast<uint32_t>(
        std::count_if(chosen_.begin(), chosen_.end(), [](const Sequence* r) { return !Parked(*r); }));
    const bool no_seat = busy + claimed.seqs >= all_seats_ || (decodes && !DecodesFit(chosen_, coming));
    const bool no_blocks = free < need + (chosen_.empty() ? 0 : watermark_);
    const bool no_slot = recurrent_ && states().num_available() + victims_.size() <= claimed.seqs;
    const bool crowded = chosen_.size() + claimed.seqs >= most_running_ || no_slot;
    if (!no_seat && !no_blocks && !crowded) {
      awaits_landing_ = in_flight;
      return !in_flight;
    }
    Sequence* const next = i == 0 ? nullptr : running_[i - 1];
    if (next == nullptr || !Outranks(s, *next)) return false;
    if (!no_blocks && !crowded && Parked(*next)) continue;  // its seat is free already
    in_flight |= next->in_flight > 0;
    free += ransom.Add(*next);
    chosen_.erase(chosen_.begin() + static_cast<std::ptrdiff_t>(i) - 1);
    victims_.push_back(next);
  }
}

// Whether decode steps in flight may carry these sequences and the coming ones, a share each. A model that gives vectors
// has no decode steps.
bool Scheduler::DecodesFit(const std::vector<Sequence*>& sequences, const StepLoad& coming) const {
  if (gives_vectors_) return true;
  StepLoad load = coming;
  for (const Sequence* s : sequences) {
    if (!Parked(*s)) AddDecode(BlocksFor(static_cast<uint32_t>(s->tokens.size())), &load);
  }
  const auto share = [this](uint32_t of) { return (of + options_.steps_in_flight - 1) / options_.steps_in_flight; };
  load.seqs = load.tokens = load.samples = share(load.seqs);
  load.all_blocks = std::max(load.blocks, share(load.all_blocks));
  return ladder_.Choose(load, options_.miss_policy == MissPolicy::kLarger ? kAnyPhase : kDecodePhases) != kNoGraph;
}

// Whether no decode graph would hold `s` beside those of higher priority: it waits, since it would only slow them down.
bool Scheduler::CrowdsDecodes(const Sequence& s) const {
  if (running_.empty() || !Outranks(*running_.front(), s)) return false;
  StepLoad coming;
  AddDecode(BlocksFor(static_cast<uint32_t>(s.tokens.size()) + 1), &coming);
  return DecodesFit({}, coming) && !DecodesFit(running_, coming);
}

void Scheduler::Evict(Sequence* victim) {
  Preempt(victim);
  ++num_evictions_;
  const auto same = std::find_if(evictions_.begin(), evictions_.end(),
                                 [victim](const EvictionCount& one) { return one.priority == victim->priority; });
  if (same != evictions_.end()) {
    ++same->count;
  } else if (evictions_.size() < LLMC_MAX_EVICTED_PRIORITIES) {
    evictions_.push_back({victim->priority, 1});
  }
}

// Counts steps in which a sequence waits behind one of higher priority. After `patience` of them the oldest such
// request counts as the highest priority until it ends. Only one is promoted at a time, and counting begins anew when
// it has ended. A long queue of low priority thus gets one request through, but does not reverse the order.
void Scheduler::KeepPatience() {
  if (num_promoted_ > 0 || running_.empty() || waiting_.empty()) return;
  const Sequence& highest = *running_.front();
  if (!Outranks(highest, **waiting_.rbegin())) return;
  contested_ = std::min<uint64_t>(contested_ + 1, options_.patience);
  if (contested_ < options_.patience) return;
  const Sequence* oldest = nullptr;
  for (const Sequence* s : waiting_) {
    if (s->held || !Outranks(highest, *s)) continue;
    if (oldest == nullptr || s->arrival < oldest->arrival) oldest = s;
  }
  if (oldest == nullptr) return;
  contested_ = 0;
  ++num_promotions_;
  Promote(oldest->arrival);
}

// Promotes all continuations of a request; their indices keep them in order.
void Scheduler::Promote(uint64_t arrival) {
  chosen_.clear();
  for (Sequence* s : waiting_) {
    if (s->arrival == arrival) chosen_.push_back(s);
  }
  for (Sequence* s : chosen_) {
    waiting_.erase(s);
    s->promoted = true;
    waiting_.insert(s);
  }
  num_promoted_ = static_cast<uint32_t>(chosen_.size());
  for (Sequence* s : running_) {
    if (s->arrival != arrival) continue;
    s->promoted = true;
    ++num_promoted_;
  }
  std::sort(running_.begin(), running_.end(), Before());
}

}  // namespace llmc
