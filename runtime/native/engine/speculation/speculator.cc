#include "engine/speculation/speculator.h"

#include <algorithm>

#include "core/clock.h"
#include "engine/engine.h"

namespace llmc {
namespace {

// A token that the grammar leaves no choice of is as likely as such a repetition.
constexpr uint32_t kForced = 4;

// Tokens of an answer before a draft reads its text.
constexpr uint32_t kFirstTokens = 4;

// Guided sequences get guesses as long as all are right with these odds: masks take the host's time.
constexpr double kLeastOffered = 0.5;

// Beams wait for one another, and n continuations are drawn from one prompt.
bool MayGuess(const Sequence& s) {
  const Request& r = *s.request;
  return r.forked && r.beams == nullptr && !s.scoring();
}

}  // namespace

// Most guesses of an item. reach: most tokens of a sequence in graphs. The last token of a request needs no guess:
// nothing is drawn behind it.
uint32_t Speculator::MostOf(const Proposal& p, uint64_t reach) const {
  const uint64_t room = std::min<uint64_t>(p.sequence->request->max_length - 1, reach);
  return room > p.size ? static_cast<uint32_t>(std::min<uint64_t>(room - p.size, most_)) : 0;
}

Speculator::Proposal Speculator::Propose(const StepItem& item, uint64_t reach) {
  Sequence* s = item.sequence;
  Proposal proposal{};
  proposal.sequence = s;
  proposal.size = static_cast<uint32_t>(s->tokens.size());
  proposal.first = static_cast<uint32_t>(guesses_.size());
  proposal.decode = item.decodes() && item.sample && MayGuess(*s);
  if (!proposal.decode) return proposal;
  if (s->lookahead == nullptr) s->lookahead = std::make_unique<Lookahead>();
  if (s->request->guided) return AskHost(proposal, reach);
  if (made_up_ >= 0) return MakeUp(proposal, reach);
  if (draft_ == nullptr) return LookUp(proposal, reach);
  return AskDraft(always_ ? proposal : LookUp(proposal, reach), reach);
}

Speculator::Proposal Speculator::LookUp(Proposal proposal, uint64_t reach) {
  Sequence* s = proposal.sequence;
  PromptLookup& lookup = s->lookahead->lookup;
  lookup.Follow(s->tokens);
  proposal.match_length = lookup.match_length();
  lookup.Guess(s->tokens, MostOf(proposal, reach), &guesses_);
  proposal.count = proposal.most = static_cast<uint32_t>(guesses_.size()) - proposal.first;
  return proposal;
}

// Rated like guesses of a draft: they are equally good after any text.
Speculator::Proposal Speculator::MakeUp(Proposal proposal, uint64_t reach) {
  proposal.match_length = Acceptance::kDraft;
  proposal.count = proposal.most = MostOf(proposal, reach);
  guesses_.insert(guesses_.end(), proposal.count, made_up_);
  return proposal;
}

// Masks exist only behind guesses that were offered to the host. Another guess is rated, but does not go along.
Speculator::Proposal Speculator::AskHost(Proposal proposal, uint64_t reach) {
  Sequence* s = proposal.sequence;
  const std::vector<int32_t>& known = s->request->masks[s->output_index].guesses;
  PromptLookup& lookup = s->lookahead->lookup;
  lookup.Follow(s->tokens);
  proposal.match_length = known.empty() ? lookup.match_length() : std::max(lookup.match_length(), kForced);
  proposal.most = std::min(MostOf(proposal, reach), static_cast<uint32_t>(known.size()));
  if (known.empty()) lookup.Guess(s->tokens, std::min(MostOf(proposal, reach), 1u), &guesses_);
  guesses_.insert(guesses_.end(), known.begin(), known.begin() + proposal.most);
  proposal.count = static_cast<uint32_t>(guesses_.size()) - proposal.first;
  return proposal;
}

std::vector<int32_t> Speculator::Offer(Sequence* s) {
  std::vector<int32_t> offered;
  const uint32_t size = static_cast<uint32_t>(s->tokens.size());
  const uint32_t most = std::min(s->request->max_length - 1 - size, most_);
  if (most == 0) return offered;
  if (s->lookahead == nullptr) s->lookahead = std::make_unique<Lookahead>();
  PromptLookup& lookup = s->lookahead->lookup;
  lookup.Follow(s->tokens);
  const double odds = acceptance_.Odds(s->lookahead->repeated, lookup.match_length());
  uint32_t count = 0;
  double likely = odds;
  while (count < most && (always_ || likely >= kLeastOffered)) {
    likely *= odds;
    ++count;
  }
  lookup.Guess(s->tokens, count, &offered);
  return offered;
}

// The draft guesses only after the numbers of guesses that go along are chosen.
Speculator::Proposal Speculator::AskDraft(Proposal proposal, uint64_t reach) {
  Sequence* s = proposal.sequence;
  if (s->lookahead->draft == nullptr) s->lookahead->draft = std::make_unique<DraftState>(draft_.get());
  const uint32_t own_reach = draft_->Reach(*s);
  if (proposal.size >= own_reach) return proposal;
  proposal.unread = !draft_->Knows(*s);
  if (!proposal.unread) proposal.draft_most = MostOf(proposal, std::min<uint64_t>(reach, own_reach));
  return proposal;
}

GuessChoice Speculator::ChoiceOf(const Proposal& p) const {
  GuessChoice choice;
  choice.most = p.most;
  if (p.most > 0) choice.odds = acceptance_.Odds(*p.evidence(), p.match_length);
  choice.draft_most = p.draft_most;
  if (p.draft_most > 0) choice.draft_odds = acceptance_.Odds(p.sequence->lookahead->drafted, Acceptance::kDraft);
  return choice;
}

// Lets the draft read the first text that is worth it, in pieces of one per step, so that others do not wait for long. A
// text that begins to repeat its prompt shows it with its first tokens.
Status Speculator::ReadOn() {
  const uint32_t seqs = num_decodes_;
  for (const Proposal& p : proposals_) {
    if (!p.unread) continue;
    const Sequence& s = *p.sequence;
    GuessChoice choice = ChoiceOf(p);
    choice.draft_most = most_;
    choice.draft_odds = acceptance_.Odds(s.lookahead->drafted, Acceptance::kDraft);
    const uint32_t left = s.request->max_length - p.size;
    const bool pays =
        p.size >= s.num_prompt + kFirstTokens && depth_.PaysToRead(seqs, contexts_, choice, draft_->NumUnread(s), left);
    if (!always_ && !pays) continue;
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
  const auto asks = [this](std::size_t i) { return choices_[i].depth > 0 && choices_[i].drafted; };
  for (std::size_t i = 0; i < proposals_.size(); ++i) {
    if (!asks(i)) continue;
    tasks_.push_back({proposals_[i].sequence, choices_[i].depth, 0});
    levels = std::max(levels, choices_[i].depth);
  }
  if (tasks_.empty()) return Status::Ok();
  const uint64_t begin = MonotonicNs();
  LLMC_RETURN_IF_ERROR(draft_->Guess(&tasks_, &guesses_));
  depth_.Drafted(levels, MonotonicNs() - begin);
  std::size_t task = 0;
  for (std::size_t i = 0; i < proposals_.size(); ++i) {
    if (!asks(i)) continue;
    proposals_[i].drafted = true;
    proposals_[i].draft_first = tasks_[task].first;
    proposals_[i].draft_count = choices_[i].depth = tasks_[task].depth;
    ++task;
  }
  return Status::Ok();
}

void Speculator::ChooseAll(uint32_t room) {
  for (GuessChoice& choice : choices_) {
    choice.drafted = choice.draft_most > 0;
    choice.depth = std::min(choice.drafted ? choice.draft_most : choice.most, room);
    room -= choice.depth;
  }
}

Status Speculator::WarmDraft() {
  uint64_t ns = 0;
  LLMC_RETURN_IF_ERROR(draft_->Warm(&ns));
  depth_.ExpectDraft(ns);
  return Status::Ok();
}

Status Speculator::Plan(Scheduler* scheduler, StepPlan* plan) {
  proposals_.clear();
  draft_ns_ = 0;
  if (most_ == 0 || (plan->prefill && !plan->mixed) || plan->miss.count > 0) return Status::Ok();
  guesses_.clear();
  choices_.clear();
  contexts_ = 0;
  num_decodes_ = num_again_ = 0;
  mixed_ = plan->mixed;
  const uint64_t reach = scheduler->GuessReach(*plan);
  for (const StepItem& item : plan->items) {
    const Proposal& proposal = proposals_.emplace_back(Propose(item, reach));
    num_decodes_ += proposal.decode || !mixed_;
    if (proposal.decode || !mixed_) contexts_ += item.start + item.count;
    num_again_ += item.num_again;
    choices_.push_back(ChoiceOf(proposal));
  }
  const uint32_t room = scheduler->GuessRoom(*plan);
  if (always_) {
    ChooseAll(room);
  } else if (mixed_) {
    depth_.ChooseMixed(num_decodes_, contexts_, room, &choices_);
  } else {
    depth_.Choose(contexts_, room, {num_again_, scheduler->recurrent()}, &choices_);
  }
  if (draft_ != nullptr) {
    const uint64_t begin = MonotonicNs();
    LLMC_RETURN_IF_ERROR(ReadOn());
    LLMC_RETURN_IF_ERROR(MakeGuesses());
    draft_ns_ = MonotonicNs() - begin;
    total_draft_ns_ += draft_ns_;
  }
  for (std::size_t i = 0; i < proposals_.size(); ++i) {
    Proposal& p = proposals_[i];
    p.depth = scheduler->AddGuesses(guesses_.data() + p.first_taken(), choices_[i].depth, &plan->items[i], plan);
  }
  if (plan->guessing && !scheduler->ChooseForGuesses(plan)) {
    for (Proposal& p : proposals_) p.depth = 0;
  }
  num_rows_ = plan->load.tokens;
  return Status::Ok();
}

void Speculator::KeepStates(const StepPlan& plan, const float* states) {
  const uint32_t width = draft_->states_width();
  for (const StepItem& item : plan.items) {
    Sequence* s = item.sequence;
    if (!s->request->guided && s->request->beams == nullptr) {
      if (s->lookahead == nullptr) s->lookahead = std::make_unique<Lookahead>();
      s->lookahead->states.Take(item.start, states, item.count, width);
    }
    states += std::size_t{item.count} * width;
  }
}

void Speculator::Fork(const Sequence& parent, Sequence* child) const {
  if (parent.lookahead == nullptr || draft_ == nullptr || draft_->states_width() == 0) return;
  child->lookahead = std::make_unique<Lookahead>();
  child->lookahead->states = parent.lookahead->states;
}

uint32_t Speculator::Rate(const Proposal& p, uint32_t first, uint32_t looked, uint32_t match_length, Evidence* own) {
  if (looked == 0) return 0;
  const int32_t* came = p.sequence->tokens.data() + p.size;
  const int32_t* guessed = guesses_.data() + first;
  const uint32_t hits = static_cast<uint32_t>(std::mismatch(came, came + looked, guessed).first - came);
  acceptance_.Add(match_length, std::min(hits + 1, looked), hits, own);
  return hits;
}

// Rates guesses, known ones even if they did not go along: of these the first alone, or as many as tokens came where a
// draft's went along. Returns how many went along and were right.
uint32_t Speculator::Judge(const Proposal& p) {
  if (!p.decode) return 0;
  Lookahead& lookahead = *p.sequence->lookahead;
  const uint32_t known = static_cast<uint32_t>(p.sequence->tokens.size()) - p.size;
  const uint32_t looked = p.drafted ? std::min(p.count, known) : std::min({std::max(p.depth, 1u), p.count, known});
  uint32_t taken = looked;
  uint32_t hits = Rate(p, p.first, looked, p.match_length, p.evidence());
  if (p.drafted) {
    taken = std::min({p.depth, p.draft_count, known});
    hits = Rate(p, p.draft_first, taken, Acceptance::kDraft, &lookahead.drafted);
  }
  if (p.draft_most > 0 && p.depth == 0) acceptance_.Age(Acceptance::kDraft, &lookahead.drafted);
  if (p.depth > 0) num_judged_ += std::min(hits + 1, taken);
  return std::min(hits, p.depth);
}

void Speculator::Learn(uint64_t tokens, uint64_t ns) {
  if (proposals_.empty()) return;
  uint32_t taken = 0, right = 0;
  for (const Proposal& p : proposals_) {
    taken += p.depth;
    right += Judge(p);
  }
  const uint64_t own_ns = ns - std::min(ns, draft_ns_);
  if (mixed_) {
    depth_.TookMixed(num_decodes_, taken + num_again_, right, num_rows_, own_ns);
  } else {
    depth_.Took(num_decodes_, contexts_, taken + num_again_, tokens, own_ns);
  }
  proposals_.clear();
}

}  // namespace llmc
