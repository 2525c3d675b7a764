// GuessDepth: how many guesses a step takes along. More than none only where they are expected to pay, and only while what
// guesses have lost so far, taken with what they won, stays within a small share of the time that plain steps would take.
#pragma once
#include <cstdint>
#include <vector>

#include "engine/speculation/step_costs.h"

namespace llmc {

// A sequence of the step, and how many of its guesses go along.
struct GuessChoice {
  double odds = 0;  // that a guess is right, given those before it are
  uint32_t most = 0;  // guesses it may bring
  uint32_t depth = 0;
};

class GuessDepth {
 public:
  // All loss together stays below this share of the time of plain steps, and kFirstCredit of one such step.
  static constexpr double kMostLoss = 0.02;

  // Fills in each depth for a decode step of these sequences; room: rows that a graph has beside one for each.
  // contexts: as StepCosts takes them. drafted: a draft makes them, one for each sequence at a time.
  void Choose(uint64_t contexts, uint32_t room, bool drafted, std::vector<GuessChoice>* choices);
  // The same for the decodes of a step that computes prompts, too. There a row takes at most what the rows of such steps
  // take in the mean, and a token that comes of it spares its part of a plain step.
  void ChooseMixed(uint32_t seqs, uint64_t contexts, uint32_t room, bool drafted, std::vector<GuessChoice>* choices);
  // Whether it pays that a draft reads so many tokens of a text whose guesses are right with these odds, up to `most` in a
  // step, while `left` tokens of it are to come: what its guesses promise is twice what reading takes.
  bool PaysToRead(uint32_t seqs, uint64_t contexts, double odds, uint32_t most, uint32_t tokens, uint32_t left) const;
  void Read(uint32_t tokens, uint64_t ns);
  // What a guess of a draft takes, before it has made any while serving.
  void ExpectDraft(uint64_t ns) {
    if (draft_ns_ == 0) draft_ns_ = static_cast<double>(ns);
  }
  // A draft made so many guesses of each sequence, one behind the other, for the next step that is told of.
  void Drafted(uint32_t levels, uint64_t ns);
  // A decode step with so many guesses took `ns`, without making them, and gave so many tokens.
  void Took(uint32_t seqs, uint64_t contexts, uint32_t guesses, uint64_t tokens, uint64_t ns);
  // A mixed step of so many rows, guesses included, of which so many were right.
  void TookMixed(uint32_t seqs, uint32_t guesses, uint32_t right, uint32_t rows, uint64_t ns);

  // Plain steps that may still be lost.
  double credit() const { return credit_; }

 private:
  // What was won long ago must not be lost at once when a text changes.
  static constexpr double kFirstCredit = 1, kMostCredit = 4;
  struct Gain {
    double odds;
    uint32_t choice, level;
  };
  // Assumed until a draft has run, in the warm-up or while serving: cost of a level as a share of a step, and of a token
  // that is read as a share of a level.
  static constexpr double kDraftShare = 0.25, kReadShare = 0.1;
  void SortGains(std::vector<GuessChoice>* choices);
  double DraftShare(uint32_t seqs) const { return draft_ns_ > 0 ? draft_ns_ / costs_.Plain(seqs) : kDraftShare; }

  StepCosts costs_;
  double credit_ = kFirstCredit;
  double draft_ns_ = 0, read_ns_ = 0;  // of a level; of a token that is read
  double row_ns_ = 0;  // of a row of mixed steps
  uint32_t levels_ = 0;  // of the next step
  std::vector<Gain> gains_;
};

}  // namespace llmc
