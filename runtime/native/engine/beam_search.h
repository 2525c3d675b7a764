// Beam search: which continuations of the beams go on, and which finished ones are the best. Knows no sequence and no KV
// block; beams are numbers below width, best first.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "engine/transcript.h"
#include "sampling/sampler.h"

namespace llmc {

class BeamSearch {
 public:
  // stop_ids: each ends a beam, in which it counts. max_tokens: of a beam.
  BeamSearch(const SamplingParams& params, std::vector<int32_t> stop_ids, uint32_t max_tokens);

  // How many of the likeliest tokens behind each beam are wanted.
  uint32_t num_best() const { return std::max(num_kept_ + static_cast<uint32_t>(stop_ids_.size()), num_top_); }
  uint32_t num_beams() const { return static_cast<uint32_t>(beams_.size()); }

  // The likeliest tokens behind a beam, in any order of the beams.
  void Take(uint32_t beam, std::vector<TokenLogprob> best);
  bool taken(uint32_t beam) const { return !beams_[beam].best.empty(); }
  bool complete() const;

  // A beam of the next step: beam `from` of this one, and a token more.
  struct Move {
    uint32_t from;
    int32_t token;
  };
  // When complete. False when the search has ended; else *moves are the beams from now on.
  bool Advance(std::vector<Move>* moves);

  // The best of those that finished, best first; at most `count`, which is at most the width.
  std::vector<Transcript> Best(uint32_t count) const;

 private:
  static constexpr uint32_t kNoNode = UINT32_MAX;
  // A token of one beam or several. Its alternatives are the first ones of a row of tops_.
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
    float score;  // by length
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
  uint32_t length_ = 0;  // tokens of each running beam
  bool may_improve_ = true;
  std::vector<Beam> beams_{1};
  std::vector<Finished> finished_;  // best first
  std::vector<Node> nodes_;
  std::vector<TokenLogprob> tops_;  // [row][num_top_]
  uint32_t first_row_ = 0;  // of this step's beams
};

}  // namespace llmc
