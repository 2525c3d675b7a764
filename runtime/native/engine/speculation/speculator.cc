#include "engine/speculation/speculator.h"

#include <algorithm>

#include "core/clock.h"
#include "engine/engine.h"

namespace llmc {
namespace {

// Guesses of a draft are judged like those behind a repetition of this length, of which there are none then.
constexpr uint32_t kOfDraft = 4;

// Who waits for masks has none for the tokens behind a guess, beams wait for one another, and n continuations are drawn
// from one prompt.
bool MayGuess(const Sequence& s) {
  const Request& r = *s.request;
  return r.forked && !r.guided && r.beams == nullptr && !s.scoring();
}

}  // namespace

// Guesses that it may bring; reach: tokens that graphs can hold of a sequence. The last token of a request needs no guess:
// nothing is drawn behind it.
uint32_t Speculator::MostOf(const Proposal& p, uint64_t reach) const {
  const uint64_t room = std::min<uint64_t>(p.sequence->request->max_length - 1, reach);
  return room > p.size ? static_cast<uint32_t>(std::min<uint64_t>(room - p.size, most_)) : 0;
}

Speculator::Proposal Speculator::Propose(const StepItem& item, uint64_t reach) {
  Sequence* s = item.sequence;
  const Proposal proposal{
      s, static_cast<uint32_t>(s->tokens.size()), 0, static_cast<uint32_t>(guesses_.size()), 0, 0, false};
  if (!MayGuess(*s)) return proposal;
  if (s->lookahead == nullptr) s->lookahead = std::make_unique<Lookahead>();
  return draft_ == nullptr ? LookUp(proposal, reach) : AskDraft(proposal, reach);
}

Speculator::Proposal Speculator::LookUp(Proposal proposal, uint64_t reach) {
  Sequence* s = proposal.sequence;
  PromptLookup& lookup = s->lookahead->lookup;
  lookup.Follow(s->tokens);
  proposal.match_length = lookup.match_length();
  lookup.Guess(s->tokens, MostOf(proposal, reach), &guesses_);
  proposal.count = static_cast<uint32_t>(guesses_.size()) - proposal.first;
  return proposal;
}

// What it will say is asked for when it is known how much of it goes along.
Speculator::Proposal Speculator::AskDraft(Proposal proposal, uint64_t reach) {
  Sequence* s = proposal.sequence;
  proposal.match_length = kOfDraft;
  if (s->lookahead->draft == nullptr) s->lookahead->draft = std::make_unique<DraftState>(draft_.get());
  if (proposal.size >= draft_->max_length()) return proposal;
  proposal.unread = !draft_->Knows(*s);
  if (!proposal.unread) proposal.count = MostOf(proposal, std::min<uint64_t>(reach, draft_->max_length()));
  return proposal;
}

// A text is read in pieces, one a step, so that others do not wait for long: the first one that is worth it.
Status Speculator::ReadOn() {
  const uint32_t seqs = static_cast<uint32_t>(proposals_.size());
  for (const Proposal& p : proposals_) {
    if (!p.unread) continue;
    const Sequence& s = *p.sequence;
    const double odds = acceptance_.Odds(s.lookahead->evidence, kOfDraft);
    const uint32_t left = s.request->max_length - p.size;
    if (!always_ && !depth_.PaysToRead(seqs, contexts_, odds, most_, DraftModel::NumUnread(s), left)) continue;
    const uint64_t begin = MonotonicNs();
    uint32_t tokens = 0;
    LLMC_RETURN_IF_ERROR(draft_->Read(s, &tokens));
    if (tokens > 0) depth_.Read(tokens, MonotonicNs() - begin);
    break;
  }
  return Status::Ok();
}

Status Speculator::MakeGuesses() {
  tasks_.clear();
  uint32_t levels = 0;
  for (std::size_t i = 0; i < proposals_.size(); ++i) {
    proposals_[i].count = 0;
    if (choices_[i].depth > 0) tasks_.push_back({proposals_[i].sequence, choices_[i].depth, 0});
    levels = std::max(levels, choices_[i].depth);
  }
  if (tasks_.empty()) return Status::Ok();
  const uint64_t begin = MonotonicNs();
  LLMC_RETURN_IF_ERROR(draft_->Guess(&tasks_, &guesses_));
  depth_.Drafted(levels, MonotonicNs() - begin);
  std::size_t task = 0;
  for (std::size_t i = 0; i < proposals_.size(); ++i) {
    if (choices_[i].depth == 0) continue;
    proposals_[i].first = tasks_[task].first;
    proposals_[i].count = choices_[i].depth = tasks_[task].depth;
    ++task;
  }
  return Status::Ok();
}

void Speculator::ChooseAll(uint32_t room) {
  for (GuessChoice& choice : choices_) {
    choice.depth = std::min(choice.most, room);
    room -= choice.depth;
  }
}

Status Speculator::Plan(Scheduler* scheduler, StepPlan* plan) {
  proposals_.clear();
  draft_ns_ = 0;
  if (most_ == 0 || plan->prefill || plan->miss.count > 0) return Status::Ok();
  guesses_.clear();
  choices_.clear();
  contexts_ = 0;
  const uint64_t reach = scheduler->GuessReach();
  for (const StepItem& item : plan->items) {
    const Proposal& proposal = proposals_.emplace_back(Propose(item, reach));
    contexts_ += item.start + 1;
    const double odds =
        proposal.count == 0 ? 0 : acceptance_.Odds(proposal.sequence->lookahead->evidence, proposal.match_length);
    choices_.push_back({odds, proposal.count, 0});
  }
  const uint32_t room = scheduler->GuessRoom(*plan);
  if (always_) {
    ChooseAll(room);
  } else {
    depth_.Choose(contexts_, room, draft_ != nullptr, &choices_);
  }
  if (draft_ != nullptr) {
    const uint64_t begin = MonotonicNs();
    LLMC_RETURN_IF_ERROR(ReadOn());
    LLMC_RETURN_IF_ERROR(MakeGuesses());
    draft_ns_ = MonotonicNs() - begin;
  }
  for (std::size_t i = 0; i < proposals_.size(); ++i) {
    Proposal& p = proposals_[i];
    p.depth = scheduler->AddGuesses(guesses_.data() + p.first, choices_[i].depth, &plan->items[i], plan);
  }
  if (plan->guessing && !scheduler->ChooseForGuesses(plan)) {
    for (Proposal& p : proposals_) p.depth = 0;
  }
  return Status::Ok();
}

// Counts guesses up to the first wrong one. The first is judged also where it stayed at home: it would have been right if
// the token came.
void Speculator::Judge(const Proposal& p) {
  const uint32_t known = static_cast<uint32_t>(p.sequence->tokens.size()) - p.size;
  const uint32_t looked = std::min({std::max(p.depth, 1u), p.count, known});
  const int32_t* came = p.sequence->tokens.data() + p.size;
  const int32_t* guessed = guesses_.data() + p.first;
  const uint32_t hits = static_cast<uint32_t>(std::mismatch(came, came + looked, guessed).first - came);
  if (looked == 0 && p.match_length == kOfDraft) acceptance_.Age(kOfDraft, &p.sequence->lookahead->evidence);
  if (looked == 0) return;
  acceptance_.Add(p.match_length, std::min(hits + 1, looked), hits, &p.sequence->lookahead->evidence);
}

void Speculator::Learn(uint64_t tokens, uint64_t ns) {
  if (proposals_.empty()) return;
  uint32_t taken = 0;
  for (const Proposal& p : proposals_) {
    taken += p.depth;
    Judge(p);
  }
  depth_.Took(static_cast<uint32_t>(proposals_.size()), contexts_, taken, tokens, ns - std::min(ns, draft_ns_));
  proposals_.clear();
}

}  // namespace llmc
