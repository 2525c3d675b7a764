#include "engine/speculation/guess_depth.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace llmc {

namespace {

// Low times weigh more: other programs only add to them.
void Mix(double value, double* mean) { *mean += (*mean == 0 ? 1 : value < *mean ? 0.3 : 0.1) * (value - *mean); }

// Expected number of right guesses, if `most` go along.
double Right(double odds, uint32_t most) { return odds >= 1 ? most : odds * (1 - std::pow(odds, most)) / (1 - odds); }

}  // namespace

void GuessDepth::SortGains(uint32_t levels, std::vector<GuessChoice>* choices) {
  gains_.clear();
  for (uint32_t i = 0; i < choices->size(); ++i) {
    GuessChoice& choice = (*choices)[i];
    choice.depth = 0;
    const uint32_t made = std::min(levels, choice.draft_most);
    choice.drafted = Right(choice.draft_odds, made) > Right(choice.odds, choice.most);
    const double base = choice.drafted ? choice.draft_odds : choice.odds;
    double odds = 1;
    for (uint32_t j = 0; j < (choice.drafted ? made : choice.most); ++j)
      gains_.push_back({odds *= base, base, i, j + 1});
  }
  // Odds of one sequence fall, so its guesses stay in order.
  std::stable_sort(gains_.begin(), gains_.end(), [](const Gain& a, const Gain& b) { return a.odds > b.odds; });
}

// Of large numbers only some, as each costs a search.
template <class Try>
void GuessDepth::EachDepth(double draft_share, std::vector<GuessChoice>* choices, Try try_levels) {
  uint32_t levels = 0;
  for (const GuessChoice& choice : *choices) levels = std::max(levels, choice.draft_most);
  for (; levels > 0; levels -= levels > 16 ? 8 : levels > 8 ? 2 : 1) {
    if (draft_share * levels > credit_ + kMostLoss) continue;
    SortGains(levels, choices);
    try_levels(levels);
  }
  SortGains(0, choices);
  try_levels(0);
}

void GuessDepth::Apply(const Best& best, std::vector<GuessChoice>* choices) {
  if (best.levels > 0) SortGains(best.levels, choices);
  for (uint32_t i = 0; i < best.guesses; ++i) ++(*choices)[gains_[i].choice].depth;
}

// For each number of levels, a draft's guesses up to it cost rows alone, as known ones do.
void GuessDepth::Choose(uint64_t contexts, uint32_t room, const Again& again, std::vector<GuessChoice>* choices) {
  const uint32_t seqs = static_cast<uint32_t>(choices->size());
  if (!costs_.Known(seqs, contexts)) return SortGains(0, choices);
  const uint32_t tried = costs_.MostExtra(seqs), spare = std::min(room, tried - std::min(tried, again.rows));
  const double without = costs_.Extra(seqs, again.rows), draft_share = DraftShare(seqs);
  double best_rate = seqs / (1 + without);
  Best best;
  EachDepth(draft_share, choices, [&](uint32_t levels) {
    const double drafting = draft_share * levels;
    double tokens = seqs, later = 0;
    for (uint32_t count = 1; count <= std::min<std::size_t>(spare, gains_.size()); ++count) {
      const Gain& gain = gains_[count - 1];
      tokens += gain.odds;
      const double rows = costs_.Extra(seqs, again.rows + count);
      // The step costs this much even if all guesses are wrong.
      if (rows - without + drafting > credit_ + kMostLoss) break;
      // The mean number of right ones of a sequence where not all of its guesses are.
      if (again.right) {
        later += gain.odds - gain.level * gain.odds + (gain.level > 1 ? (gain.level - 1) * gain.odds / gain.base : 0);
      }
      const double all = rows * (1 + later / (again.rows + count)) + drafting;
      if (tokens / (1 + all) <= best_rate) continue;
      best_rate = tokens / (1 + all);
      best = {levels, count};
    }
  });
  Apply(best, choices);
}

void GuessDepth::ChooseMixed(uint32_t seqs, uint64_t contexts, uint32_t room, std::vector<GuessChoice>* choices) {
  if (row_ns_ == 0 || !costs_.Known(seqs, contexts)) return SortGains(0, choices);
  const double row = row_ns_ / costs_.Plain(seqs), draft_share = DraftShare(seqs);
  double best_gain = 0;
  Best best;
  EachDepth(draft_share, choices, [&](uint32_t levels) {
    double gain = 0;
    for (uint32_t count = 1; count <= std::min<std::size_t>(room, gains_.size()); ++count) {
      gain += gains_[count - 1].odds / seqs;
      const double extra = row * count + draft_share * levels;
      if (extra > credit_ + kMostLoss) break;
      if (gain - extra <= best_gain) continue;
      best_gain = gain - extra;
      best = {levels, count};
    }
  });
  Apply(best, choices);
}

double GuessDepth::BestRate(uint32_t seqs, double odds, uint32_t most, double level_share) const {
  double best_rate = 1, rate = 1, likely = 1;
  for (uint32_t depth = 1; depth <= most; ++depth) {
    rate += likely *= odds;
    best_rate = std::max(best_rate, rate / (1 + costs_.Extra(seqs, seqs * depth) + level_share * depth));
  }
  return best_rate;
}

bool GuessDepth::PaysToRead(uint32_t seqs, uint64_t contexts, const GuessChoice& choice, uint32_t tokens,
                            uint32_t left) const {
  if (!costs_.Known(seqs, contexts)) return false;
  const double share = DraftShare(seqs), plain = costs_.Plain(seqs);
  const double known = BestRate(seqs, choice.odds, choice.most, 0);
  const double drafted = BestRate(seqs, choice.draft_odds, choice.draft_most, share);
  // The sequence has its part of the time of all sequences.
  const double gain = left * plain * (1 / known - 1 / drafted) / seqs;
  const double each = read_ns_ > 0 ? read_ns_ : kReadShare * share * plain;
  return gain > 2 * each * tokens;
}

void GuessDepth::Read(uint32_t tokens, uint64_t ns) { Mix(static_cast<double>(ns) / tokens, &read_ns_); }

void GuessDepth::Drafted(uint32_t levels, uint64_t ns) {
  if (levels == 0) return;
  levels_ = levels;
  Mix(static_cast<double>(ns) / levels, &draft_ns_);
}

void GuessDepth::Took(uint32_t seqs, uint64_t contexts, uint32_t extra, uint64_t tokens, uint64_t ns) {
  costs_.Take(seqs, contexts, extra, ns);
  if (extra == 0) {
    credit_ += kMostLoss;
  } else {
    // Plain steps that would have given these tokens, minus those that would have taken the expected time of this step.
    // Its measured time would say more of the machine than of the step.
    credit_ += (1 + kMostLoss) * tokens / seqs - (1 + costs_.Extra(seqs, extra)) - DraftShare(seqs) * levels_;
  }
  levels_ = 0;
  credit_ = std::min(credit_, kMostCredit);
}

void GuessDepth::TookMixed(uint32_t seqs, uint32_t extra, uint32_t right, uint32_t rows, uint64_t ns) {
  Mix(static_cast<double>(ns) / rows, &row_ns_);
  const uint32_t levels = std::exchange(levels_, 0);
  const double plain = seqs == 0 ? 0 : costs_.Plain(seqs);
  if (plain <= 0) return;
  credit_ += kMostLoss;
  if (extra > 0) credit_ += static_cast<double>(right) / seqs - extra * row_ns_ / plain - DraftShare(seqs) * levels;
  credit_ = std::min(credit_, kMostCredit);
}

}  // namespace llmc
