// Acceptance: measured probability that a guess is right. Long repetitions continue more often than short ones, and
// some texts repeat themselves more than others. Guesses of a draft are equally good after any text.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>

namespace llmc {

// Guesses that were checked, and those that were right; older ones weigh less.
struct Evidence {
  double tries = 0, hits = 0;

  void Add(uint32_t more, uint32_t right, double memory) {
    const double kept = std::max(1 - more / memory, 0.0);
    tries = tries * kept + more;
    hits = hits * kept + right;
  }
};

class Acceptance {
 public:
  // In place of the length of a repetition: a draft guesses.
  static constexpr uint32_t kDraft = UINT32_MAX;

  // Probability that the next guess of a sequence is right, from its own evidence. Where that is thin, all guesses
  // after repetitions of that length count, too.
  double Odds(const Evidence& own, uint32_t match_length) const {
    const Evidence& all = classes_[ClassOf(match_length)];
    const double usual = (all.hits + kBelief * Believed(match_length)) / (all.tries + kBelief);
    return (own.hits + kBelief * usual) / (own.tries + kBelief);
  }
  // Evidence ages while nothing is tried, so that guessing is eventually tried again.
  void Age(uint32_t match_length, Evidence* own) {
    own->tries *= kAge, own->hits *= kAge;
    Evidence& all = classes_[ClassOf(match_length)];
    all.tries *= kAge, all.hits *= kAge;
  }
  void Add(uint32_t match_length, uint32_t tries, uint32_t hits, Evidence* own) {
    own->Add(tries, hits, kOwnMemory);
    classes_[ClassOf(match_length)].Add(tries, hits, kMemory);
  }

 private:
  static constexpr double kBelief = 4, kOwnMemory = 24, kMemory = 512, kAge = 0.99;
  static constexpr uint32_t kClasses = 7;
  static uint32_t ClassOf(uint32_t length) {
    return length < 3 ? length : length < 5 ? 3 : length < 9 ? 4 : length < kDraft ? 5 : 6;
  }
  static double Believed(uint32_t length) { return length == kDraft ? 0.6 : std::min(0.2 + 0.1 * length, 0.8); }
  std::array<Evidence, kClasses> classes_{};
};

}  // namespace llmc
