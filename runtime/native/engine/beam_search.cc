#include "engine/beam_search.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace llmc {

BeamSearch::BeamSearch(const SamplingParams& params, std::vector<int32_t> stop_ids, uint32_t max_tokens)
    : width_(params.beam_width),
      num_top_(static_cast<uint32_t>(std::max(params.num_logprobs, 0))),
      min_tokens_(params.min_tokens),
      max_tokens_(max_tokens),
      length_penalty_(params.length_penalty),
      early_stopping_(params.early_stopping),
      stop_ids_(std::move(stop_ids)) {
  std::sort(stop_ids_.begin(), stop_ids_.end());
  stop_ids_.erase(std::unique(stop_ids_.begin(), stop_ids_.end()), stop_ids_.end());
  // Enough that width_ beams can go on even if all stop tokens are among the candidates.
  num_kept_ = width_ * std::max(2u, 1 + static_cast<uint32_t>(stop_ids_.size()));
}

void BeamSearch::Take(uint32_t beam, std::vector<TokenLogprob> best) { beams_[beam].best = std::move(best); }

bool BeamSearch::complete() const {
  return std::none_of(beams_.begin(), beams_.end(), [](const Beam& beam) { return beam.best.empty(); });
}

bool BeamSearch::IsStop(int32_t token) const { return std::binary_search(stop_ids_.begin(), stop_ids_.end(), token); }

float BeamSearch::ByLength(float score, uint32_t length) const {
  return score / static_cast<float>(std::pow(static_cast<double>(length), static_cast<double>(length_penalty_)));
}

// Continuations of all beams by one token, likeliest first: num_kept_, or all there are.
std::vector<BeamSearch::Candidate> BeamSearch::Candidates() const {
  std::vector<Candidate> all;
  const bool full = length_ + 1 >= max_tokens_, early = length_ < min_tokens_;
  for (uint32_t b = 0; b < beams_.size(); ++b) {
    uint32_t rank = 0, kept = 0;
    for (const TokenLogprob& next : beams_[b].best) {
      ++rank;
      const bool stop = IsStop(next.token);
      if (stop && early) continue;
      all.push_back({b, rank, next, beams_[b].score + next.logprob, stop || full});
      if (++kept == num_kept_) break;
    }
  }
  std::stable_sort(all.begin(), all.end(), [](const Candidate& a, const Candidate& b) { return a.score > b.score; });
  if (all.size() > num_kept_) all.resize(num_kept_);
  return all;
}

bool BeamSearch::Advance(std::vector<Move>* moves) {
  const std::vector<Candidate> candidates = Candidates();
  KeepTops();
  Finish(candidates);
  ++length_;
  moves->clear();
  std::vector<Beam> next;
  for (const Candidate& c : candidates) {
    if (c.ends || next.size() == width_) continue;
    next.push_back({AddNode(c), c.score, {}});
    moves->push_back({c.beam, c.next.token});
  }
  first_row_ += num_beams();
  beams_ = std::move(next);
  if (beams_.empty()) return false;
  may_improve_ = may_improve_ && MayImprove(beams_.front().score);
  return may_improve_ && !(early_stopping_ == LLMC_EARLY_STOPPING_ON && finished_.size() == width_);
}

// Stores alternatives only if they were asked for.
void BeamSearch::KeepTops() {
  if (num_top_ == 0) return;
  for (const Beam& beam : beams_) {
    for (uint32_t i = 0; i < num_top_; ++i) {
      tops_.push_back(i < beam.best.size() ? beam.best[i] : TokenLogprob{-1, 0});
    }
  }
}

uint32_t BeamSearch::AddNode(const Candidate& c) {
  nodes_.push_back({beams_[c.beam].node, c.next.token, c.next.logprob, c.rank, first_row_ + c.beam});
  return static_cast<uint32_t>(nodes_.size() - 1);
}

// Of the candidates that end, only those among the width_ best count. The others are there so that enough beams go on.
void BeamSearch::Finish(const std::vector<Candidate>& candidates) {
  for (size_t i = 0; i < std::min<size_t>(width_, candidates.size()); ++i) {
    const Candidate& c = candidates[i];
    if (c.ends) finished_.push_back({AddNode(c), ByLength(c.score, length_ + 1), IsStop(c.next.token)});
  }
  std::stable_sort(finished_.begin(), finished_.end(),
                   [](const Finished& a, const Finished& b) { return a.score > b.score; });
  if (finished_.size() > width_) finished_.resize(width_);
}

bool BeamSearch::MayImprove(float best_running) const {
  if (finished_.size() < width_) return true;
  const bool longest = early_stopping_ == LLMC_EARLY_STOPPING_NEVER && length_penalty_ > 0;
  return ByLength(best_running, longest ? max_tokens_ : length_) > finished_.back().score;
}

std::vector<Transcript> BeamSearch::Best(uint32_t count) const {
  std::vector<Transcript> out;
  for (size_t i = 0; i < std::min<size_t>(count, finished_.size()); ++i) {
    std::vector<const Node*> path;
    for (uint32_t n = finished_[i].node; n != kNoNode; n = nodes_[n].before) path.push_back(&nodes_[n]);
    Transcript& told = out.emplace_back();
    for (size_t j = path.size(); j-- > 0;) {
      const Node& node = *path[j];
      SampleResult sample;
      sample.token = node.token;
      sample.logprob = node.logprob;
      sample.rank = node.rank;
      for (uint32_t t = 0; t < num_top_; ++t) {
        const TokenLogprob& top = tops_[static_cast<size_t>(node.row) * num_top_ + t];
        if (top.token < 0) break;
        sample.top_token_ids[sample.num_top] = top.token;
        sample.top_logprobs[sample.num_top++] = top.logprob;
      }
      told.Add(sample);
    }
    told.stopped = finished_[i].stopped;
  }
  return out;
}

}  // namespace llmc
