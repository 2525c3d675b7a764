// Scheduler, continued: waiting sequences of a higher priority take the place of running ones of a lower one, and none
// waits behind higher ones for ever.
#include <algorithm>
#include <unordered_map>

#include "engine/scheduler.h"

namespace llmc {
namespace {

// Blocks that would be free when sequences gave theirs up, one sequence after another.
class Ransom {
 public:
  // `kept`: cached blocks that are no gain, since whom they are for begins with them.
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

// A sequence of so many blocks.
void AddDecode(uint32_t blocks, StepLoad* load) {
  load->tokens = load->samples = ++load->seqs;
  load->blocks = std::max(load->blocks, blocks);
  load->all_blocks += blocks;
}

}  // namespace

// Before a step is planned, so that no victim is in it. In the order of service, with room for those before it: nobody
// overtakes who does not fit.
void Scheduler::MakeWay() {
  StepLoad claimed;  // blocks: of the pool
  StepLoad coming;   // in a decode step
  for (Sequence* s : waiting_) {
    if (running_.empty() || !Outranks(*s, *running_.back())) return;
    if (s->held) continue;  // it could not use what it took
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

// Into victims_: the fewest that `s` outranks, lowest priority and youngest first, without whom it can be admitted
// beside `claimed`. False when that cannot be: then nobody loses anything.
bool Scheduler::ChooseVictims(const Sequence& s, const StepLoad& claimed, const StepLoad& coming) {
  victims_.clear();
  chosen_ = running_;  // who stays
  Ransom ransom(*blocks_, hits_);
  uint32_t free = blocks_->num_free();
  for (uint32_t b : hits_) free -= blocks_->ref(b) == 0;
  const uint32_t need = NumNewBlocks(s) + claimed.blocks;
  const bool decodes = DecodesFit({}, coming);  // else no company changes that
  for (size_t i = running_.size();; --i) {
    const uint32_t busy = static_cast<uint32_t>(
        std::count_if(chosen_.begin(), chosen_.end(), [](const Sequence* r) { return !Parked(*r); }));
    const bool no_seat = busy + claimed.seqs >= options_.max_num_seqs || (decodes && !DecodesFit(chosen_, coming));
    const bool no_blocks = free < need + (chosen_.empty() ? 0 : watermark_);
    const bool crowded = chosen_.size() + claimed.seqs >= most_running_;
    if (!no_seat && !no_blocks && !crowded) return true;
    Sequence* const next = i == 0 ? nullptr : running_[i - 1];
    if (next == nullptr || !Outranks(s, *next)) return false;
    if (!no_blocks && !crowded && Parked(*next)) continue;  // its seat is free already
    free += ransom.Add(*next);
    chosen_.erase(chosen_.begin() + static_cast<std::ptrdiff_t>(i) - 1);
    victims_.push_back(next);
  }
}

// Whether one decode step may carry these and those that come. A model that gives vectors has no such step.
bool Scheduler::DecodesFit(const std::vector<Sequence*>& sequences, const StepLoad& coming) const {
  if (gives_vectors_) return true;
  StepLoad load = coming;
  for (const Sequence* s : sequences) {
    if (!Parked(*s)) AddDecode(BlocksFor(static_cast<uint32_t>(s->tokens.size())), &load);
  }
  return ladder_.Choose(load, options_.miss_policy == MissPolicy::kLarger ? kAnyPhase : kDecodePhases) != kNoGraph;
}

// What a decode graph does not hold beside those of higher priority would only slow them down: it waits.
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

// Steps in which somebody waits behind one of higher priority are counted; after `patience` of them the request that has
// been there longest counts as the highest until it ends. One at a time, and counting begins anew when it has ended: a
// long queue of a low priority gets one request through, and does not turn the order round.
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

// All continuations of a request, which stay in order by their indices.
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
