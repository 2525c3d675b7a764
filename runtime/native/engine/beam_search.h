// Beam search: chooses which continuations of beams survive, and the best finished ones. It knows no sequences and no
// KV blocks; beams are numbers below the width, best first.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "engine/transcript.h"
#include "sampling/sampler.h"

namespace llmc {

class BeamSearch {
 public:
  // stop_ids: each one ends a beam and counts as its last token. max_tokens: of a beam.
  BeamSearch(const SamplingParams& params, std::vector<int32_t> stop_ids, uint32_t max_tokens);

  // Number of likeliest tokens needed for each beam.
  uint32_t num_best() const { return std::max(num_kept_ + static_cast<uint32_t>(stop_ids_.size()), num_top_); }
  uint32_t num_beams() const { return static_cast<uint32_t>(beams_.size()); }

  // Takes the likeliest tokens of a beam; beams may come in any order.
  void Take(uint32_t beam, std::vector<TokenLogprob> best);
  bool taken(uint32_t beam) const { return !beams_[beam].best.empty(); }
  bool complete() const;

  // A beam of the next step: beam `from` of this step plus one token.
  struct Move {
    uint32_t from;
    int32_t token;
  };
  // Call once all beams were taken. False if the search has ended; else *moves are the next beams.
  bool Advance(std::vector<Move>* moves);

  // The best finished beams, best first; at most `count`, which is at most the width.
  std::vector<Transcript> Best(uint32_t count) const;

 private:
  static constexpr uint32_t kNoNode = UINT32_MAX;
  // A token that one or more beams share. Its alternatives are the first ones in a row of tops_.
  struct Node {
    uint32_t before;
    int32_t token;
    float logprob;
    uint32_t rank, row;
  };
  struct Beam {
    uint32_t node = kNoNode;
    float score = 0;  // the sum of its logprobs
    std::vector<TokenLogprob> best;
  };
  struct Candidate {
    uint32_t beam, rank;
    TokenLogprob next;
    float score;
    bool ends;
  };
  struct Finished {
    uint32_t node;
    float score;  // normalized by length
    bool stopped;
  };

  bool IsStop(int32_t token) const;
  std::vector<Candidate> Candidates() const;
  void Finish(const std::vector<Candidate>& candidates);
  bool MayImprove(float best_running) const;
  float ByLength(float score, uint32_t length) const;
  void KeepTops();
  uint32_t AddNode(const Candidate& candidate);

  uint32_t width_, num_kept_, num_top_, min_tokens_, max_tokens_;
  float length_penalty_;
  uint32_t early_stopping_;
  std::vector<int32_t> stop_ids_;
  uint32_t length_ = 0;  // tokens in each running beam
  bool may_improve_ = true;
  std::vector<Beam> beams_{1};
  std::vector<Finished> finished_;  // best first
  std::vector<Node> nodes_;
  std::vector<TokenLogprob> tops_;  // [row][num_top_]
  uint32_t first_row_ = 0;  // first row of this step's beams
};

}  // namespace llmc
