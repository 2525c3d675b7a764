// Reference output of best_of and beam search: whole texts, recomputed for every token.
#pragma once
#include <cmath>
#include <numeric>

#include "support/engine_harness.h"

namespace llmc_test {

inline std::vector<float> LogitsAfter(const std::vector<int32_t>& tokens) {
  uint64_t fold = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    fold = Fold(fold, TokenHash(fold, tokens[i], static_cast<uint32_t>(i)));
  }
  std::vector<float> logits(kVocab);
  LogitsOf(fold, kVocab, logits.data());
  return logits;
}

// Beam search as in transformers: every token behind every beam, best first.
inline std::vector<Output> ReferenceBeams(const Job& job, uint32_t max_len) {
  struct Text {
    std::vector<int32_t> tokens;
    std::vector<float> logprobs;
    float score;
    bool ends, stopped;
  };
  const llmc_sampling_params& p = job.params;
  const uint32_t width = p.beam_width, prompt = static_cast<uint32_t>(job.prompt.size());
  const uint32_t most = std::min(max_len - prompt, p.max_tokens);
  const auto by_length = [&p](float score, uint32_t length) {
    return score / static_cast<float>(std::pow(double{static_cast<double>(length)}, double{p.length_penalty}));
  };
  const auto better = [](const Text& a, const Text& b) { return a.score > b.score; };
  Sampler sampler(kVocab, {kEos});
  std::vector<Text> running{{job.prompt, {}, 0, false, false}}, finished;
  for (uint32_t length = 1;; ++length) {
    std::vector<Text> all;
    for (const Text& beam : running) {
      const std::vector<float> logits = LogitsAfter(SeenBy(job, beam.tokens));
      std::vector<int32_t> order(kVocab);
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
      for (int32_t token : order) {
        const bool stop = (!p.ignore_eos && token == kEos) || std::count(job.stops.begin(), job.stops.end(), token) > 0;
        if (stop && length <= p.min_tokens) continue;
        SampleResult r;
        CHECK_OK(sampler.Score(logits.data(), token, 0, 0, &r));
        Text next = beam;
        next.tokens.push_back(token);
        next.logprobs.push_back(r.logprob);
        next.score += r.logprob;
        next.stopped = stop;
        next.ends = stop || length == most;
        all.push_back(std::move(next));
      }
    }
    std::stable_sort(all.begin(), all.end(), better);
    for (size_t i = 0; i < std::min<size_t>(width, all.size()); ++i) {
      if (!all[i].ends) continue;
      finished.push_back(all[i]);
      finished.back().score = by_length(all[i].score, length);
    }
    std::stable_sort(finished.begin(), finished.end(), better);
    if (finished.size() > width) finished.resize(width);
    running.clear();
    for (const Text& text : all) {
      if (!text.ends && running.size() < width) running.push_back(text);
    }
    if (running.empty()) break;
    if (finished.size() < width) continue;
    if (p.early_stopping == LLMC_EARLY_STOPPING_ON) break;
    const bool longest = p.early_stopping == LLMC_EARLY_STOPPING_NEVER && p.length_penalty > 0;
    if (!(by_length(running[0].score, longest ? most : length) > finished.back().score)) break;
  }
  CHECK(finished.size() >= p.n);
  std::vector<Output> out(p.n);
  for (uint32_t i = 0; i < p.n; ++i) {
    const Text& text = finished[i];
    out[i].reason = text.stopped ? LLMC_FINISH_STOP : LLMC_FINISH_LENGTH;
    out[i].stop = text.stopped ? text.tokens.back() : -1;
    out[i].tokens.assign(text.tokens.begin() + prompt, text.tokens.end() - text.stopped);
    out[i].logprobs.assign(text.logprobs.begin(), text.logprobs.end() - text.stopped);
  }
  if (job.num_prompt_logprobs >= 0) {
    Job plain = job;
    plain.params.beam_width = 0;
    plain.params.n = plain.params.max_tokens = 1;
    plain.params.min_tokens = 0;
    out[0].prompt = Reference(plain, 0, max_len).prompt;
  }
  return out;
}

inline std::vector<Output> ReferenceBestOf(const Job& job, uint32_t max_len) {
  Job plain = job;
  plain.params.n = job.params.best_of;
  plain.params.best_of = 0;
  plain.params.num_logprobs = std::max(plain.params.num_logprobs, 0);
  std::vector<std::pair<double, Output>> drawn;
  std::vector<Scored> prompt;
  for (uint32_t i = 0; i < plain.params.n; ++i) {
    Output one = Reference(plain, i, max_len);
    if (i == 0) prompt = one.prompt;
    one.prompt.clear();
    double sum = 0;
    for (float logprob : one.logprobs) sum += static_cast<double>(logprob);
    if (one.stop >= 0) {
      std::vector<int32_t> tokens = job.prompt;
      tokens.insert(tokens.end(), one.tokens.begin(), one.tokens.end());
      Sampler sampler(kVocab, {kEos});
      SampleResult r;
      CHECK_OK(sampler.Score(LogitsAfter(SeenBy(job, tokens)).data(), one.stop, 0, 0, &r));
      sum += static_cast<double>(r.logprob);
    }
    drawn.push_back({sum, std::move(one)});
  }
  std::stable_sort(drawn.begin(), drawn.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<Output> out;
  for (uint32_t i = 0; i < job.params.n; ++i) out.push_back(drawn[i].second);
  out[0].prompt = prompt;
  return out;
}

// Reference output of each reported continuation.
inline std::vector<Output> ReferenceOutputs(const Job& job, uint32_t max_len) {
  if (job.params.beam_width > 0) return ReferenceBeams(job, max_len);
  if (job.params.best_of > job.params.n) return ReferenceBestOf(job, max_len);
  std::vector<Output> out;
  for (uint32_t i = 0; i < job.params.n; ++i) out.push_back(Reference(job, i, max_len));
  return out;
}

}  // namespace llmc_test
