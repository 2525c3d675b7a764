// GuessDepth: number of guesses that a step takes along. Guesses go along only where they are expected to pay. Their
// net loss stays within a small share of the time that plain steps would take.
#pragma once
#include <cstdint>
#include <vector>

#include "engine/speculation/step_costs.h"

namespace llmc {

// Number of guesses of one sequence in the step. They are of one kind: known already, or still to be made by a draft,
// one level at a time for all sequences.
struct GuessChoice {
  double odds = 0;  // probability that a known guess is right if those before it are
  uint32_t most = 0;  // most of them
  uint32_t depth = 0;  // chosen number
  double draft_odds = 0;  // the same of a draft's guesses
  uint32_t draft_most = 0;
  bool drafted = false;  // the chosen kind
};

class GuessDepth {
 public:
  // Bound of the net loss, as a share of the time of plain steps; kFirstCredit steps come on top.
  static constexpr double kMostLoss = 0.02;

  // Tokens that are computed twice. rows: in this step, as they were guesses before. right: so will those of this step
  // that are right, unless all of their sequence are.
  struct Again {
    uint32_t rows = 0;
    bool right = false;
  };

  // Fills in each depth for a decode step of these sequences. contexts: as in StepCosts. room: rows that a graph has
  // beside those of the step.
  void Choose(uint64_t contexts, uint32_t room, const Again& again, std::vector<GuessChoice>* choices);
  // The same for the decodes of a mixed step. There a row costs at most the mean time per row of mixed steps, and a
  // token gained saves its part of a plain step.
  void ChooseMixed(uint32_t seqs, uint64_t contexts, uint32_t room, std::vector<GuessChoice>* choices);
  // Whether a draft should read `tokens` tokens of a text: expected gain over known guesses of at least twice the time of
  // reading. choice: of the sequence, if the draft knew the text. left: tokens of the text still to come.
  bool PaysToRead(uint32_t seqs, uint64_t contexts, const GuessChoice& choice, uint32_t tokens, uint32_t left) const;
  void Read(uint32_t tokens, uint64_t ns);
  // Sets the time of a draft's guess, until guesses are timed while serving.
  void ExpectDraft(uint64_t ns) {
    if (draft_ns_ == 0) draft_ns_ = static_cast<double>(ns);
  }
  // A draft made `levels` guesses of each sequence, one behind the other, for the step that Took reports next.
  void Drafted(uint32_t levels, uint64_t ns);
  // A decode step with `extra` rows beyond one per sequence took `ns`, without the time of making guesses, and gave
  // `tokens` tokens.
  void Took(uint32_t seqs, uint64_t contexts, uint32_t extra, uint64_t tokens, uint64_t ns);
  // A mixed step of `rows` rows took `ns`. `extra` of them were guesses, of which `right` were right, or computed again.
  void TookMixed(uint32_t seqs, uint32_t extra, uint32_t right, uint32_t rows, uint64_t ns);

  // Further loss allowed, in plain steps.
  double credit() const { return credit_; }

 private:
  // Credit is bounded: gains of long ago must not be lost all at once when the text changes.
  static constexpr double kFirstCredit = 1, kMostCredit = 4;
  struct Gain {
    double odds, base;  // base: odds of each guess of the sequence
    uint32_t choice, level;
  };
  struct Best {
    uint32_t levels = 0, guesses = 0;  // of a draft; of all kinds, the first of gains_
  };
  // Assumed until a draft is timed, in the warm-up or while serving. kDraftShare: cost of a level as a share of a step;
  // kReadShare: cost of reading a token as a share of a level.
  static constexpr double kDraftShare = 0.25, kReadShare = 0.1;
  // Chooses the kind of each sequence, where a draft makes so many levels, and lists gains_, the likeliest first.
  void SortGains(uint32_t levels, std::vector<GuessChoice>* choices);
  // Calls try_levels() behind SortGains(levels), for numbers of a draft's levels that the credit covers, down to 0.
  template <class Try>
  void EachDepth(double draft_share, std::vector<GuessChoice>* choices, Try try_levels);
  // The most tokens of a sequence in the time of a plain step, if all sequences have such guesses.
  double BestRate(uint32_t seqs, double odds, uint32_t most, double level_share) const;
  void Apply(const Best& best, std::vector<GuessChoice>* choices);
  double DraftShare(uint32_t seqs) const { return draft_ns_ > 0 ? draft_ns_ / costs_.Plain(seqs) : kDraftShare; }

  StepCosts costs_;
  double credit_ = kFirstCredit;
  double draft_ns_ = 0, read_ns_ = 0;  // time of a level; of a token that is read
  double row_ns_ = 0;  // time of a row of mixed steps
  uint32_t levels_ = 0;  // levels drafted for the next step
  std::vector<Gain> gains_;
};

}  // namespace llmc
