// Speculator: takes guesses of next tokens along with the decodes of a step. A token has the same bits in any step, so the logits
// behind a guess that turns out right are those that the next step would give.
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
  // most: guesses of a sequence in a step; 0: none. always: whether they pay or not.
  // draft: makes the guesses; none: prompt and output do.
  Speculator(uint32_t most, bool always, std::unique_ptr<DraftModel> draft)
      : most_(most), always_(always), draft_(std::move(draft)) {}

  // The model that guesses; none: NULL.
  DraftModel* draft() const { return draft_.get(); }
  // What the draft has taken of all steps.
  uint64_t total_draft_ns() const { return total_draft_ns_; }
  // Makes the draft warm, and learns what its guesses take. There must be one.
  Status WarmDraft();
  // Adds guesses to the decodes of a step where they are expected to pay; from here on their sequences end in them. An error:
  // the draft's device failed.
  Status Plan(Scheduler* scheduler, StepPlan* plan);
  // Guesses for a guided sequence that waits for its mask: as many as are likely enough that their masks are used.
  std::vector<int32_t> Offer(Sequence* sequence);
  // The hidden states that a step of the model has left, guesses included: before sequences are forked.
  void KeepStates(const StepPlan& plan, const float* states);
  // A continuation begins where `parent` is.
  void Fork(const Sequence& parent, Sequence* child) const;
  // What became of the guesses, once the tokens of the step were taken in and before a sequence is gone. tokens: that the
  // step gave; ns: that it took, guesses included.
  void Learn(uint64_t tokens, uint64_t ns);

 private:
  // Of an item of the step: guesses_[first, first + count), of which `most` may go along and `depth` do.
  struct Proposal {
    Sequence* sequence;
    uint32_t size;  // its tokens before the step
    uint32_t match_length, first, count, most, depth;
    bool decode;  // one new token, which the next one is drawn behind
    bool unread;  // the draft does not know its text yet
  };
  uint32_t MostOf(const Proposal& proposal, uint64_t reach) const;
  Proposal Propose(const StepItem& item, uint64_t reach);
  Proposal LookUp(Proposal proposal, uint64_t reach);
  Proposal AskDraft(Proposal proposal, uint64_t reach);
  Proposal AskHost(Proposal proposal, uint64_t reach);
  Status ReadOn();
  Status MakeGuesses();
  void ChooseAll(uint32_t room);
  // How many of those that went along were right.
  uint32_t Judge(const Proposal& proposal);

  const uint32_t most_;
  const bool always_;
  std::unique_ptr<DraftModel> draft_;
  GuessDepth depth_;
  Acceptance acceptance_;
  std::vector<Proposal> proposals_;  // one for each item of a step that may bring guesses, or none
  std::vector<int32_t> guesses_;
  std::vector<GuessChoice> choices_;
  std::vector<DraftModel::Task> tasks_;
  uint64_t contexts_ = 0, draft_ns_ = 0, total_draft_ns_ = 0;
  uint32_t num_decodes_ = 0, num_rows_ = 0;  // rows_: of the step, guesses included
  bool mixed_ = false;
};

}  // namespace llmc
