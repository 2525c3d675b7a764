// Sampler: one row of logits to one token, a pure function of row, parameters, history and output index. Devices that
// sample follow these rules and use the same random numbers (UniformFromKey).
#pragma once
#include <cstdint>
#include <vector>

#include "core/status.h"
#include "sampling/logit_rows.h"

namespace llmc {

// llmc_sampling_params, validated and owned.
struct SamplingParams {
  uint32_t n = 1, max_tokens = 16, min_tokens = 0;
  float temperature = 1, top_p = 1, min_p = 0;
  int32_t top_k = 0;  // 0: off
  float repetition_penalty = 1, presence_penalty = 0, frequency_penalty = 0;
  bool ignore_eos = false;
  uint64_t seed = 0;
  int32_t num_logprobs = -1;
  uint32_t best_of = 0;     // continuations drawn, of which the n likeliest are reported; 0: n
  uint32_t beam_width = 0;  // 0: no beam search
  float length_penalty = 1;
  uint32_t early_stopping = LLMC_EARLY_STOPPING_OFF;
  std::vector<int32_t> stop_token_ids;
  std::vector<llmc_logit_bias> logit_bias;
};

// Copies and checks; errors name the offending value. Without has_seed the caller sets the seed.
Status MakeSamplingParams(const llmc_sampling_params& c, int32_t vocab_size, SamplingParams* out);

struct SampleContext {
  const int32_t* tokens;  // prompt, then output
  uint32_t num_tokens, num_prompt, output_index;
  // Token t is allowed if bit t % 32 of word t / 32 is set; tokens beyond the last word are not. NULL: all are.
  const uint32_t* mask = nullptr;
  uint32_t num_mask_words = 0;
};

struct SampleResult {
  int32_t token = -1;
  float logprob = 0;
  uint32_t rank = 0;  // of the token in the raw row, from 1, the most likely; 0 without logprobs
  uint32_t num_top = 0;
  int32_t top_token_ids[LLMC_MAX_TOP_LOGPROBS];
  float top_logprobs[LLMC_MAX_TOP_LOGPROBS];
};

// Task for one row of a step's logits: draw a token, or score a given one.
struct SampleTask {
  uint32_t row = 0;                        // index among the step's samples
  const SamplingParams* params = nullptr;  // nullptr: score `token`
  SampleContext context{};                 // for a draw
  int32_t token = -1;                      // for a score, with its position in the text
  uint32_t position = 0;
  uint32_t num_top = 0;  // likeliest tokens to report beside it
  uint32_t num_best = 0;  // not 0: draws and scores nothing, but reports this number of likeliest tokens
  bool unwanted = false;  // its sequence has ended: nobody needs to do it, and nobody reads its outcome
};

struct TokenLogprob {
  int32_t token;
  float logprob;
};

struct SampleOutcome {
  Status status;
  SampleResult result;
  std::vector<TokenLogprob> best;  // [min(num_best, vocab_size)], likeliest first
};

// Order, as in vLLM: token mask, logit bias and min_tokens mask, penalties, temperature, min-p, top-k, top-p. If the
// token mask allows only eos and stop ids, min_tokens gives way: a finished grammar must be able to end. Logprobs are
// the log-softmax of the raw row. Equal logits rank by id, lowest first. A temperature below 1e-5 is greedy.
class Sampler {
 public:
  Sampler(int32_t vocab_size, std::vector<int32_t> eos_token_ids);
  // logits: all rows of the step.
  SampleOutcome Do(const SampleTask& task, const float* logits);
  // Returns LLMC_ERR_EMPTY_MASK if the mask allows no token of the vocabulary.
  Status Sample(const float* row, const SamplingParams& params, const SampleContext& context, SampleResult* out);
  // Logprob and rank of a given token at `position`, with num_top alternatives.
  Status Score(const float* row, int32_t token, uint32_t num_top, uint32_t position, SampleResult* out);
  // The likeliest tokens of the raw row; equal ones by id.
  Status Best(const float* row, uint32_t count, uint32_t position, std::vector<TokenLogprob>* out);

 private:
  struct Candidate {
    float logit;
    int32_t id;
  };
  Status ScanFinite(const float* row, uint32_t position, RowScan* out) const;
  const float* Modify(const float* row, const SamplingParams& params, const SampleContext& context);
  bool ApplyMask(const SampleContext& context, float* x) const;
  void ForbidStops(const SamplingParams& params, bool masked, float* x);
  void BlockMaxima(const float* row);
  void SelectTop(const float* row, uint32_t k);
  int32_t Draw(const float* row, float max, const SamplingParams& params, double uniform);
  int32_t DrawFromAll(const float* row, float max, float inv_temperature, double uniform);
  double LogSum(const float* row, float max);
  void Logprobs(const float* row, float max, uint32_t num_top, SampleResult* out);

  static constexpr uint32_t kBlock = 64;
  uint32_t vocab_size_;
  std::vector<int32_t> eos_token_ids_;
  std::vector<float> modified_, weights_, maxima_, maxima_scratch_;
  std::vector<Candidate> candidates_;
  std::vector<uint32_t> output_counts_;
  std::vector<uint8_t> seen_;
  std::vector<double> span_sums_;
};

// Uniform in [0, 1) with 53 bits, a function of the key alone.
double UniformFromKey(uint64_t seed, uint64_t output_index, uint64_t position);

}  // namespace llmc
