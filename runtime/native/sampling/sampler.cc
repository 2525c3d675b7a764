#include "sampling/sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "sampling/logit_rows.h"

namespace llmc {
namespace {

constexpr float kMasked = -std::numeric_limits<float>::infinity();

uint64_t SplitMix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// Rank of a token from 1; equal logits are ranked by id.
uint32_t Rank(const float* row, uint32_t n, uint32_t token) {
  const float value = row[token];
  uint32_t before = 0;
  for (uint32_t i = 0; i < token; ++i) before += row[i] >= value;
  for (uint32_t i = token + 1; i < n; ++i) before += row[i] > value;
  return before + 1;
}

uint32_t FirstMax(const float* row, const RowScan& scan) {
  uint32_t i = scan.max_begin;
  while (i + 1 < scan.max_end && row[i] != scan.max) ++i;
  return i;
}

}  // namespace

double UniformFromKey(uint64_t seed, uint64_t output_index, uint64_t position) {
  uint64_t h = SplitMix(seed);
  h = SplitMix(h ^ SplitMix(output_index + 0x632be59bd9b4e019ull));
  h = SplitMix(h ^ SplitMix(position + 0xd1342543de82ef95ull));
  return static_cast<double>(h >> 11) * 0x1.0p-53;
}

Sampler::Sampler(int32_t vocab_size, std::vector<int32_t> eos_token_ids)
    : vocab_size_(static_cast<uint32_t>(vocab_size)),
      eos_token_ids_(std::move(eos_token_ids)),
      modified_(vocab_size_),
      weights_(vocab_size_),
      maxima_((vocab_size_ + kBlock - 1) / kBlock),
      maxima_scratch_(maxima_.size()),
      output_counts_(vocab_size_),
      seen_(vocab_size_),
      span_sums_((vocab_size_ + kSumSpan - 1) / kSumSpan) {
  candidates_.reserve(vocab_size_);
}

Status Sampler::ScanFinite(const float* row, uint32_t position, RowScan* out) const {
  *out = ScanRow(row, vocab_size_);
  if (out->finite) return Status::Ok();
  uint32_t i = 0;
  while (std::isfinite(row[i])) ++i;
  return Status::Error(LLMC_ERR_NOT_FINITE, "The model produced the logit " + std::to_string(row[i]) + " for token " +
                                                std::to_string(i) + " at position " + std::to_string(position) +
                                                "; check the weights and the precision of the artifact.");
}

SampleOutcome Sampler::Do(const SampleTask& task, const float* logits) {
  SampleOutcome out;
  const float* row = logits + static_cast<size_t>(task.row) * vocab_size_;
  if (task.num_best > 0) {
    out.status = Best(row, task.num_best, task.position, &out.best);
    return out;
  }
  out.status = task.params == nullptr ? Score(row, task.token, task.num_top, task.position, &out.result)
                                      : Sample(row, *task.params, task.context, &out.result);
  return out;
}

Status Sampler::Score(const float* row, int32_t token, uint32_t num_top, uint32_t position, SampleResult* out) {
  RowScan scan;
  LLMC_RETURN_IF_ERROR(ScanFinite(row, position, &scan));
  out->token = token;
  Logprobs(row, scan.max, num_top, out);
  return Status::Ok();
}

Status Sampler::Best(const float* row, uint32_t count, uint32_t position, std::vector<TokenLogprob>* out) {
  RowScan scan;
  LLMC_RETURN_IF_ERROR(ScanFinite(row, position, &scan));
  const double log_sum = LogSum(row, scan.max);
  BlockMaxima(row);
  SelectTop(row, std::min(count, vocab_size_));
  out->clear();
  for (const Candidate& c : candidates_) out->push_back({c.id, static_cast<float>(c.logit - log_sum)});
  return Status::Ok();
}

Status Sampler::Sample(const float* row, const SamplingParams& params, const SampleContext& context,
                       SampleResult* out) {
  RowScan of_row;
  LLMC_RETURN_IF_ERROR(ScanFinite(row, context.num_tokens, &of_row));
  out->num_top = out->rank = 0;
  out->logprob = 0;
  const float* logits = Modify(row, params, context);
  if (logits == nullptr) {
    return Status::Error(LLMC_ERR_EMPTY_MASK, "The token mask for position " + std::to_string(context.num_tokens) +
                                                  " allows no token; a finished grammar must allow eos.");
  }
  const RowScan scan = logits == row ? of_row : ScanRow(logits, vocab_size_);
  if (!std::isfinite(scan.max)) {
    return Status::Error(
        LLMC_ERR_INVALID_ARGUMENT,
        "No token can be sampled at position " + std::to_string(context.num_tokens) +
            ": bias, penalties, the token mask and the min_tokens mask left no finite logit; relax them.");
  }
  if (params.temperature < 1e-5f || params.top_k == 1) {
    out->token = static_cast<int32_t>(FirstMax(logits, scan));
  } else {
    out->token = Draw(logits, scan.max, params, UniformFromKey(params.seed, context.output_index, context.num_tokens));
  }
  if (params.num_logprobs >= 0) Logprobs(row, of_row.max, static_cast<uint32_t>(params.num_logprobs), out);
  return Status::Ok();
}

// Returns false if the mask allows no token.
bool Sampler::ApplyMask(const SampleContext& context, float* x) const {
  uint32_t any = 0;
  for (uint32_t begin = 0, w = 0; begin < vocab_size_; begin += 32, ++w) {
    const uint32_t size = std::min(32u, vocab_size_ - begin);
    uint32_t word = w < context.num_mask_words ? context.mask[w] : 0;
    if (size < 32) word &= (1u << size) - 1;
    any |= word;
    if (word == 0xffffffffu) continue;
    for (uint32_t i = 0; i < size; ++i) x[begin + i] = (word >> i) & 1 ? x[begin + i] : kMasked;
  }
  return any != 0;
}

// Applies min_tokens: forbids stop tokens. Under a token mask only while another token is left to choose.
void Sampler::ForbidStops(const SamplingParams& params, bool masked, float* x) {
  float* saved = weights_.data();
  if (masked) std::memcpy(saved, x, vocab_size_ * sizeof(float));
  for (int32_t id : eos_token_ids_) {
    if (id >= 0 && static_cast<uint32_t>(id) < vocab_size_) x[id] = kMasked;
  }
  for (int32_t id : params.stop_token_ids) x[id] = kMasked;
  if (masked && ScanRow(x, vocab_size_).max == kMasked) std::memcpy(x, saved, vocab_size_ * sizeof(float));
}

// Returns `row` itself if nothing changes it, NULL if the token mask allows nothing.
const float* Sampler::Modify(const float* row, const SamplingParams& params, const SampleContext& context) {
  const bool repetition = params.repetition_penalty != 1.0f;
  const bool counts = params.presence_penalty != 0.0f || params.frequency_penalty != 0.0f;
  const bool too_early = context.num_tokens - context.num_prompt < params.min_tokens;
  const bool masked = context.mask != nullptr;
  if (!repetition && !counts && !too_early && !masked && params.logit_bias.empty()) return row;

  float* x = modified_.data();
  std::memcpy(x, row, vocab_size_ * sizeof(float));
  if (masked && !ApplyMask(context, x)) return nullptr;
  for (const llmc_logit_bias& b : params.logit_bias) x[b.token_id] += b.bias;
  if (too_early) ForbidStops(params, masked, x);
  if (repetition) {
    for (uint32_t i = 0; i < context.num_tokens; ++i) {
      const int32_t id = context.tokens[i];
      if (seen_[id]) continue;
      seen_[id] = 1;
      x[id] = x[id] > 0 ? x[id] / params.repetition_penalty : x[id] * params.repetition_penalty;
    }
    for (uint32_t i = 0; i < context.num_tokens; ++i) seen_[context.tokens[i]] = 0;
  }
  if (counts) {
    for (uint32_t i = context.num_prompt; i < context.num_tokens; ++i) ++output_counts_[context.tokens[i]];
    for (uint32_t i = context.num_prompt; i < context.num_tokens; ++i) {
      const int32_t id = context.tokens[i];
      if (output_counts_[id] == 0) continue;
      x[id] -= params.frequency_penalty * static_cast<float>(output_counts_[id]);
      x[id] -= params.presence_penalty;
      output_counts_[id] = 0;
    }
  }
  return x;
}

void Sampler::BlockMaxima(const float* row) {
  for (uint32_t b = 0; b < maxima_.size(); ++b) {
    const uint32_t begin = b * kBlock;
    maxima_[b] = ScanRow(row + begin, std::min(kBlock, vocab_size_ - begin)).max;
  }
}

// Sets candidates_ to the k highest finite logits, best first. Needs BlockMaxima(row): the k-th highest block maximum
// is a lower bound of the k-th highest logit, so few elements are looked at twice.
void Sampler::SelectTop(const float* row, uint32_t k) {
  float threshold = std::numeric_limits<float>::lowest();
  if (k <= maxima_.size()) {
    std::copy(maxima_.begin(), maxima_.end(), maxima_scratch_.begin());
    std::nth_element(maxima_scratch_.begin(), maxima_scratch_.begin() + (k - 1), maxima_scratch_.end(),
                     [](float a, float b) { return a > b; });
    threshold = std::max(threshold, maxima_scratch_[k - 1]);
  }
  candidates_.clear();
  for (uint32_t b = 0; b < maxima_.size(); ++b) {
    if (maxima_[b] < threshold) continue;
    const uint32_t end = std::min((b + 1) * kBlock, vocab_size_);
    for (uint32_t i = b * kBlock; i < end; ++i) {
      if (row[i] >= threshold) candidates_.push_back({row[i], static_cast<int32_t>(i)});
    }
  }
  auto better = [](const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
  };
  if (candidates_.size() > k) {
    std::nth_element(candidates_.begin(), candidates_.begin() + (k - 1), candidates_.end(), better);
    candidates_.resize(k);
  }
  std::sort(candidates_.begin(), candidates_.end(), better);
}

int32_t Sampler::DrawFromAll(const float* row, float max, float inv_temperature, double uniform) {
  float* w = weights_.data();
  ExpRow(row, vocab_size_, max, inv_temperature, w);
  double total = 0;
  for (uint32_t begin = 0, span = 0; begin < vocab_size_; begin += kSumSpan, ++span) {
    span_sums_[span] = SumRow(w + begin, std::min(kSumSpan, vocab_size_ - begin));
    total += span_sums_[span];
  }
  const double target = uniform * total;
  double before = 0;
  uint32_t last = 0;
  for (uint32_t begin = 0, span = 0; begin < vocab_size_; begin += kSumSpan, ++span) {
    const uint32_t size = std::min(kSumSpan, vocab_size_ - begin);
    const double sum = span_sums_[span];
    if (before + sum <= target && begin + size < vocab_size_) {
      before += sum;
      continue;
    }
    double inside = before;
    for (uint32_t i = begin; i < begin + size; ++i) {
      if (w[i] == 0) continue;
      last = i;
      inside += w[i];
      if (inside > target) return static_cast<int32_t>(i);
    }
    before += sum;  // rounding put the target behind this span: take the next span's first token, or the last one seen
  }
  return static_cast<int32_t>(last);
}

int32_t Sampler::Draw(const float* row, float max, const SamplingParams& params, double uniform) {
  const float inv = 1.0f / params.temperature;
  const bool top_k = params.top_k > 0 && static_cast<uint32_t>(params.top_k) < vocab_size_;
  if (!top_k && params.top_p >= 1.0f && params.min_p <= 0.0f) return DrawFromAll(row, max, inv, uniform);

  BlockMaxima(row);
  // Probability mass that top_p is a share of: what min_p and top_k leave. Computed below if it depends on top_k.
  double mass = -1;
  if (!top_k && params.top_p < 1.0f) {
    float* w = weights_.data();
    ExpRow(row, vocab_size_, max, inv, w);
    if (params.min_p > 0) {
      for (uint32_t i = 0; i < vocab_size_; ++i) w[i] = w[i] >= params.min_p ? w[i] : 0.0f;
    }
    mass = SumSpans(w, vocab_size_);
  }
  // Without top_k the number of candidates is not known in advance: look at more until they suffice.
  uint32_t k = top_k ? static_cast<uint32_t>(params.top_k) : std::min(256u, vocab_size_);
  for (;;) {
    SelectTop(row, k);
    const bool complete = top_k || candidates_.size() < k || k == vocab_size_;
    uint32_t kept = 0;
    double sum = 0;
    for (Candidate& c : candidates_) {
      c.logit = ExpNegative((c.logit - max) * inv);
      if (c.logit < params.min_p) break;
      ++kept;
      sum += c.logit;
    }
    const bool min_p_ended = kept < candidates_.size();
    const double whole = mass < 0 ? sum : mass;
    const double limit = static_cast<double>(params.top_p) * whole;
    bool top_p_ended = false;
    if (params.top_p < 1.0f) {
      double before = 0;
      for (uint32_t i = 0; i < kept; ++i) {
        before += candidates_[i].logit;
        if (before >= limit) {
          top_p_ended = true;
          kept = i + 1;
          sum = before;
          break;
        }
      }
    }
    if (!complete && !min_p_ended && !top_p_ended) {
      k = k > vocab_size_ / 8 ? vocab_size_ : k * 8;
      continue;
    }
    const double target = uniform * sum;
    double inside = 0;
    for (uint32_t i = 0; i < kept; ++i) {
      inside += candidates_[i].logit;
      if (inside > target) return candidates_[i].id;
    }
    return candidates_[kept - 1].id;
  }
}

double Sampler::LogSum(const float* row, float max) {
  float* w = weights_.data();
  ExpRow(row, vocab_size_, max, 1.0f, w);
  return std::log(SumSpans(w, vocab_size_)) + max;
}

void Sampler::Logprobs(const float* row, float max, uint32_t num_top, SampleResult* out) {
  const double log_sum = LogSum(row, max);
  out->logprob = static_cast<float>(row[out->token] - log_sum);
  out->rank = Rank(row, vocab_size_, static_cast<uint32_t>(out->token));
  out->num_top = 0;
  if (num_top == 0) return;
  BlockMaxima(row);
  SelectTop(row, std::min(num_top, vocab_size_));
  for (const Candidate& c : candidates_) {
    out->top_token_ids[out->num_top] = c.id;
    out->top_logprobs[out->num_top++] = static_cast<float>(c.logit - log_sum);
  }
}

// ---- validation ------------------------------------------------------------------------------------------------

namespace {

std::string Text(float x) { return std::to_string(x); }

// Checks best_of and beam search.
Status CheckRanking(const llmc_sampling_params& c, int32_t vocab_size) {
  if (c.best_of != 0 && (c.best_of < c.n || c.best_of > LLMC_MAX_BEAMS)) {
    return Status::Invalid("best_of is " + std::to_string(c.best_of) + " but n is " + std::to_string(c.n) +
                           "; use 0 for n, or n to " + std::to_string(LLMC_MAX_BEAMS) + ".");
  }
  if (c.beam_width == 0) return Status::Ok();
  if (c.beam_width > LLMC_MAX_BEAMS || c.beam_width < c.n) {
    return Status::Invalid("beam_width is " + std::to_string(c.beam_width) + " but n is " + std::to_string(c.n) +
                           "; use 0 for no beam search, or n to " + std::to_string(LLMC_MAX_BEAMS) + ".");
  }
  if (c.beam_width + c.num_stop_token_ids > static_cast<uint64_t>(vocab_size)) {
    return Status::Invalid("beam_width is " + std::to_string(c.beam_width) + " but the vocabulary has " +
                           std::to_string(vocab_size) + " tokens, stop ids among them; use a smaller beam_width.");
  }
  if (c.best_of != 0) {
    return Status::Invalid("best_of is " + std::to_string(c.best_of) +
                           " beside beam search; leave it at 0, n of the beams are told.");
  }
  if (!std::isfinite(c.length_penalty)) {
    return Status::Invalid("length_penalty is " + Text(c.length_penalty) + "; use a finite number.");
  }
  if (c.early_stopping > LLMC_EARLY_STOPPING_NEVER) {
    return Status::Invalid(
        "early_stopping is " + std::to_string(c.early_stopping) +
        "; use LLMC_EARLY_STOPPING_OFF (0), LLMC_EARLY_STOPPING_ON (1) or LLMC_EARLY_STOPPING_NEVER (2).");
  }
  if (c.repetition_penalty != 1 || c.presence_penalty != 0 || c.frequency_penalty != 0 || c.num_logit_bias != 0) {
    return Status::Invalid("Beam search goes by the model's own probabilities; leave out penalties and logit_bias.");
  }
  return Status::Ok();
}

}  // namespace

Status MakeSamplingParams(const llmc_sampling_params& c, int32_t vocab_size, SamplingParams* out) {
  // Comparisons are written so that NaN fails them.
  if (c.n < 1 || c.n > 64) return Status::Invalid("n is " + std::to_string(c.n) + "; use 1 to 64.");
  if (c.max_tokens < 1) return Status::Invalid("max_tokens is 0; use at least 1.");
  if (c.min_tokens > c.max_tokens) {
    return Status::Invalid("min_tokens is " + std::to_string(c.min_tokens) + " but max_tokens is " +
                           std::to_string(c.max_tokens) + "; use a min_tokens no larger than max_tokens.");
  }
  if (!(c.temperature >= 0 && std::isfinite(c.temperature))) {
    return Status::Invalid("temperature is " + Text(c.temperature) + "; use 0 (greedy) or a positive number.");
  }
  if (!(c.top_p > 0 && c.top_p <= 1))
    return Status::Invalid("top_p is " + Text(c.top_p) + "; use more than 0 and at most 1.");
  if (!(c.min_p >= 0 && c.min_p <= 1)) return Status::Invalid("min_p is " + Text(c.min_p) + "; use 0 to 1.");
  if (c.top_k < -1)
    return Status::Invalid("top_k is " + std::to_string(c.top_k) + "; use 0 or -1 (off) or a positive number.");
  if (!(c.repetition_penalty > 0 && std::isfinite(c.repetition_penalty))) {
    return Status::Invalid("repetition_penalty is " + Text(c.repetition_penalty) +
                           "; use a positive number, 1 for none.");
  }
  if (!(c.presence_penalty >= -2 && c.presence_penalty <= 2)) {
    return Status::Invalid("presence_penalty is " + Text(c.presence_penalty) + "; use -2 to 2.");
  }
  if (!(c.frequency_penalty >= -2 && c.frequency_penalty <= 2)) {
    return Status::Invalid("frequency_penalty is " + Text(c.frequency_penalty) + "; use -2 to 2.");
  }
  if (c.num_logprobs < -1 || c.num_logprobs > LLMC_MAX_TOP_LOGPROBS) {
    return Status::Invalid("num_logprobs is " + std::to_string(c.num_logprobs) + "; use -1 (none) to " +
                           std::to_string(LLMC_MAX_TOP_LOGPROBS) + ".");
  }
  if (c.num_stop_token_ids > 0 && c.stop_token_ids == nullptr) {
    return Status::Invalid("stop_token_ids is NULL but num_stop_token_ids is " + std::to_string(c.num_stop_token_ids) +
                           ".");
  }
  if (c.num_logit_bias > 0 && c.logit_bias == nullptr) {
    return Status::Invalid("logit_bias is NULL but num_logit_bias is " + std::to_string(c.num_logit_bias) + ".");
  }
  for (uint64_t i = 0; i < c.num_stop_token_ids; ++i) {
    if (c.stop_token_ids[i] < 0 || c.stop_token_ids[i] >= vocab_size) {
      return Status::Invalid("stop_token_ids[" + std::to_string(i) + "] is " + std::to_string(c.stop_token_ids[i]) +
                             "; use 0 to " + std::to_string(vocab_size - 1) + ".");
    }
  }
  for (uint64_t i = 0; i < c.num_logit_bias; ++i) {
    if (c.logit_bias[i].token_id < 0 || c.logit_bias[i].token_id >= vocab_size) {
      return Status::Invalid("logit_bias[" + std::to_string(i) + "].token_id is " +
                             std::to_string(c.logit_bias[i].token_id) + "; use 0 to " + std::to_string(vocab_size - 1) +
                             ".");
    }
    if (!std::isfinite(c.logit_bias[i].bias)) {
      return Status::Invalid("logit_bias[" + std::to_string(i) + "].bias is " + Text(c.logit_bias[i].bias) +
                             "; use a finite number.");
    }
  }
  LLMC_RETURN_IF_ERROR(CheckRanking(c, vocab_size));
  out->n = c.n;
  out->max_tokens = c.max_tokens;
  out->min_tokens = c.min_tokens;
  out->temperature = c.temperature;
  out->top_p = c.top_p;
  out->min_p = c.min_p;
  out->top_k = std::max(c.top_k, 0);
  out->repetition_penalty = c.repetition_penalty;
  out->presence_penalty = c.presence_penalty;
  out->frequency_penalty = c.frequency_penalty;
  out->ignore_eos = c.ignore_eos != 0;
  if (c.has_seed) out->seed = c.seed;
  out->num_logprobs = c.num_logprobs;
  out->best_of = c.best_of;
  out->beam_width = c.beam_width;
  out->length_penalty = c.length_penalty;
  out->early_stopping = c.early_stopping;
  out->stop_token_ids.assign(c.stop_token_ids, c.stop_token_ids + c.num_stop_token_ids);
  out->logit_bias.assign(c.logit_bias, c.logit_bias + c.num_logit_bias);
  return Status::Ok();
}

}  // namespace llmc
