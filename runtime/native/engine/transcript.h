// The events of a continuation, stored token by token, for a request that returns its continuations after all have
// ended.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "sampling/sampler.h"

namespace llmc {

class Transcript {
 public:
  // All tokens of a transcript have the same number of alternatives.
  void Add(const SampleResult& sample) {
    entries_.push_back({sample.token, sample.logprob, sample.rank});
    num_top_ = sample.num_top;
    for (uint32_t i = 0; i < num_top_; ++i) tops_.push_back({sample.top_token_ids[i], sample.top_logprobs[i]});
    logprob_ += static_cast<double>(sample.logprob);
  }

  uint32_t size() const { return static_cast<uint32_t>(entries_.size()); }
  double logprob() const { return logprob_; }  // sum over all tokens

  SampleResult at(uint32_t index) const {
    SampleResult out;
    const Entry& entry = entries_[index];
    out.token = entry.token;
    out.logprob = entry.logprob;
    out.rank = entry.rank;
    out.num_top = num_top_;
    for (uint32_t i = 0; i < num_top_; ++i) {
      const TokenLogprob& top = tops_[static_cast<size_t>(index) * num_top_ + i];
      out.top_token_ids[i] = top.token;
      out.top_logprobs[i] = top.logprob;
    }
    return out;
  }

  bool stopped = false;  // the last token is an eos or stop id; else the length limit ended it

 private:
  struct Entry {
    int32_t token;
    float logprob;
    uint32_t rank;
  };
  std::vector<Entry> entries_;
  std::vector<TokenLogprob> tops_;  // [size][num_top]
  uint32_t num_top_ = 0;
  double logprob_ = 0;
};

}  // namespace llmc
