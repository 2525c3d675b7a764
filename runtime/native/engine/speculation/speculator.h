// Speculator: takes guesses of next tokens along with the decodes of a step. A token's results have the same bits in
// any step, so the logits behind a right guess are those that the next step would give.
#pragma once
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "engine/scheduler.h"
#include "engine/speculation/acceptance.h"
#include "engine/speculation/draft_model.h"
#include "engine/speculation/guess_depth.h"

namespace llmc {

class Speculator {
 public:
  // most: most guesses per sequence and step; 0: none. always: guess whether it pays or not.
  // draft: model that makes guesses where that promises more than those that are looked up in prompt and output; nullptr:
  // all are looked up. With `always`, all are its own.
  // made_up: token that all guesses are, in a simulation; -1: none.
  Speculator(uint32_t most, bool always, std::unique_ptr<DraftModel> draft, int32_t made_up = -1)
      : most_(most), always_(always), made_up_(made_up), draft_(std::move(draft)) {}

  // The draft model, or nullptr.
  DraftModel* draft() const { return draft_.get(); }
  // Time of the draft in all steps.
  uint64_t total_draft_ns() const { return total_draft_ns_; }
  // Guesses that went along, up to the first wrong one of each sequence and step.
  uint64_t num_judged() const { return num_judged_; }
  // Warms up the draft, which must exist, and times its guesses.
  Status WarmDraft();
  // Adds guesses to the decodes of a step where they are expected to pay; their sequences end in them from here on.
  // Returns an error if the draft's device failed.
  Status Plan(Scheduler* scheduler, StepPlan* plan);
  // Guesses for a guided sequence that waits for its mask: those likely enough that their masks are used.
  std::vector<int32_t> Offer(Sequence* sequence);
  // Whether the draft reads hidden states of the model.
  bool keeps_states() const { return most_ > 0 && draft_ != nullptr && draft_->states_width() > 0; }
  // Keeps those that a step computed, guesses included. Call before sequences are forked.
  void KeepStates(const StepPlan& plan, const float* states);
  // `child` continues where `parent` is.
  void Fork(const Sequence& parent, Sequence* child) const;
  // Learns which guesses were right. Call after the step's tokens are appended and before any sequence is freed.
  // tokens: given by the step. ns: time of the step, guesses included.
  void Learn(uint64_t tokens, uint64_t ns);

 private:
  // Guesses for an item of the step: known ones are guesses_[first, first + count), of which `most` may go along. A
  // draft may make `draft_most` others, and has made guesses_[draft_first, draft_first + draft_count). `depth` of one
  // kind go along.
  struct Proposal {
    Sequence* sequence;
    uint32_t size;  // tokens of the sequence before the step
    uint32_t match_length, first, count, most;
    uint32_t draft_most, draft_first, draft_count;
    uint32_t depth;
    bool drafted;  // the draft's go along
    bool decode;  // computes one token and draws the next
    bool unread;  // the draft does not know its text yet
    Evidence* evidence() const {
      return match_length == Acceptance::kDraft ? &sequence->lookahead->drafted : &sequence->lookahead->repeated;
    }
    uint32_t first_taken() const { return drafted ? draft_first : first; }
  };
  uint32_t MostOf(const Proposal& proposal, uint64_t reach) const;
  Proposal Propose(const StepItem& item, uint64_t reach);
  Proposal LookUp(Proposal proposal, uint64_t reach);
  Proposal MakeUp(Proposal proposal, uint64_t reach);
  Proposal AskDraft(Proposal proposal, uint64_t reach);
  Proposal AskHost(Proposal proposal, uint64_t reach);
  GuessChoice ChoiceOf(const Proposal& proposal) const;
  // Rates guesses_[first, first + looked), of one kind, up to the first wrong one. Returns how many were right.
  uint32_t Rate(const Proposal& proposal, uint32_t first, uint32_t looked, uint32_t match_length, Evidence* own);
  Status ReadOn();
  Status MakeGuesses();
  void ChooseAll(uint32_t room);
  // Returns how many of the guesses that went along were right.
  uint32_t Judge(const Proposal& proposal);

  const uint32_t most_;
  const bool always_;
  const int32_t made_up_;
  std::unique_ptr<DraftModel> draft_;
  GuessDepth depth_;
  Acceptance acceptance_;
  std::vector<Proposal> proposals_;  // [item] of a step that may bring guesses, else empty
  std::vector<int32_t> guesses_;
  std::vector<GuessChoice> choices_;
  std::vector<DraftModel::Task> tasks_;
  uint64_t contexts_ = 0, draft_ns_ = 0, total_draft_ns_ = 0, num_judged_ = 0;
  uint32_t num_decodes_ = 0, num_rows_ = 0;  // num_rows_: rows of the step, guesses included
  uint32_t num_again_ = 0;  // rows of the step that compute former guesses once more
  bool mixed_ = false;
};

}  // namespace llmc
