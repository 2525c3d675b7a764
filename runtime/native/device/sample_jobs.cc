#include "device/sample_jobs.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace llmc {
namespace {

constexpr uint32_t kPiece = 4096, kSpan = 512;
constexpr uint32_t kJobWords = 16, kResultWords = 64, kPartialWords = 4, kEditWords = 4, kChangeWords = 2;
constexpr uint32_t kMostJobs = 256, kMostCopies = 32, kLeastEdits = 16384;
constexpr float kGreedyBelow = 1e-5f, kLargeBias = 1e30f;
// Words of a job.
enum JobWord : uint32_t { kRow, kOwn, kTold, kToken, kMask, kMaskWords, kScale, kMinP, kCount, kFlags };
constexpr int32_t kTopK = 1, kTopP = 2, kMass = 4, kTells = 8;
// Words of a result.
enum ResultWord : uint32_t { kStatus, kFound, kLargest, kLogit, kNum, kIds = 8, kLogits = 28 };
enum ChangeKind : uint32_t { kAdd, kForbid, kRepeat, kSubtract };

int32_t BitsOf(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

float FloatOf(int32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

uint32_t Ceil(uint32_t value, uint32_t by) { return (value + by - 1) / by; }

bool TooEarly(const SampleTask& task) {
  return task.context.num_tokens - task.context.num_prompt < task.params->min_tokens;
}

bool Modifies(const SampleTask& task) {
  const SamplingParams& p = *task.params;
  return p.repetition_penalty != 1.0f || p.presence_penalty != 0.0f || p.frequency_penalty != 0.0f || TooEarly(task) ||
         task.context.mask != nullptr || !p.logit_bias.empty();
}

// The word of a mask that contains the token's bit.
uint32_t MaskWord(const SampleContext& context, uint32_t token) {
  return token / 32 < context.num_mask_words ? context.mask[token / 32] : 0;
}

}  // namespace

const std::vector<SampleOperand>& OperandsOf(SampleStage stage) {
  using O = SampleOperand;
  static const std::vector<SampleOperand> operands[kNumSampleStages] = {
      {O::kJobs, O::kMasks, O::kLogits, O::kCopies, O::kPartials},
      {O::kEdits, O::kChanges, O::kCopies},
      {O::kJobs, O::kLogits, O::kCopies, O::kPartials, O::kMaxima},
      {O::kJobs, O::kLogits, O::kCopies, O::kPartials, O::kSums},
      {O::kJobs, O::kPartials, O::kResults},
      {O::kJobs, O::kNumbers, O::kLogits, O::kCopies, O::kPartials, O::kSums, O::kResults},
      {O::kJobs, O::kNumbers, O::kLogits, O::kCopies, O::kPartials, O::kMaxima, O::kSums, O::kResults, O::kTotals},
      {O::kJobs, O::kLogits, O::kCopies, O::kResults, O::kCounts},
      {O::kResults, O::kInputIds},
  };
  return operands[static_cast<uint32_t>(stage)];
}

SampleSizes::SampleSizes(uint32_t vocab_size, uint32_t max_model_len, uint32_t block_size, uint32_t most_candidates)
    : vocab(vocab_size),
      block(block_size),
      candidates(most_candidates),
      pieces(Ceil(vocab_size, kPiece)),
      spans(Ceil(vocab_size, kSpan)),
      blocks(Ceil(vocab_size, block_size)),
      max_jobs(kMostJobs),
      max_copies(kMostCopies),
      max_edits(kLeastEdits + std::min(vocab_size, max_model_len)),
      max_changes(3 * max_edits) {
  const auto place = [this](SampleOperand operand, uint64_t bytes, uint64_t* of) {
    offsets[static_cast<uint32_t>(operand)] = *of;
    *of = RoundUp(*of + bytes, kAlignment);
  };
  constexpr uint64_t kWord = sizeof(int32_t), kWide = sizeof(double);
  const uint64_t jobs = max_jobs;
  upload_bytes = kAlignment;  // scalars
  place(SampleOperand::kJobs, jobs * kJobWords * kWord, &upload_bytes);
  place(SampleOperand::kNumbers, jobs * 2 * kWide, &upload_bytes);
  place(SampleOperand::kEdits, uint64_t{max_edits} * kEditWords * kWord, &upload_bytes);
  place(SampleOperand::kChanges, uint64_t{max_changes} * kChangeWords * kWord, &upload_bytes);
  place(SampleOperand::kMasks, uint64_t{max_copies} * Ceil(vocab, 32) * kWord, &upload_bytes);
  place(SampleOperand::kCopies, uint64_t{max_copies} * vocab * kWord, &scratch_bytes);
  place(SampleOperand::kPartials, jobs * pieces * kPartialWords * kWord, &scratch_bytes);
  place(SampleOperand::kMaxima, jobs * blocks * kWord, &scratch_bytes);
  place(SampleOperand::kSums, jobs * spans * kWide, &scratch_bytes);
  place(SampleOperand::kResults, jobs * kResultWords * kWord, &result_bytes);
  place(SampleOperand::kTotals, jobs * kWide, &result_bytes);
  place(SampleOperand::kCounts, jobs * pieces * kWord, &result_bytes);
}

SampleJobs::SampleJobs(const SampleSizes& sizes, std::vector<int32_t> eos_token_ids)
    : sizes_(sizes), eos_token_ids_(std::move(eos_token_ids)), upload_(sizes.upload_bytes), edit_of_(sizes.vocab, -1) {
  jobs_.reserve(sizes_.max_jobs);
  place_.reserve(sizes_.max_jobs);
  edited_.reserve(sizes_.max_edits);
  counts_.reserve(sizes_.vocab);
  counts_.resize(sizes_.vocab);
  changes_.reserve(sizes_.max_changes);
}

// Whether the device draws a task. Rare ones are left to the host, which has no limits of sizes.
bool SampleJobs::Takes(const SampleTask& task) const {
  if (task.num_best > 0) return false;
  if (task.params == nullptr) return true;
  const SamplingParams& p = *task.params;
  if (p.top_k > static_cast<int64_t>(sizes_.candidates) && static_cast<uint32_t>(p.top_k) < sizes_.vocab) return false;
  const uint64_t changed = p.logit_bias.size() + eos_token_ids_.size() + p.stop_token_ids.size();
  if (changed > kLeastEdits / 2) return false;
  if (task.context.mask == nullptr) return true;
  bool any = false, more = false;  // any: the mask allows a token; more: it allows one that is no stop
  for (uint32_t token = 0; token < sizes_.vocab && !more; ++token) {
    if (token % 32 == 0 && MaskWord(task.context, token) == 0) {
      token += 31;
      continue;
    }
    if ((MaskWord(task.context, token) >> (token % 32) & 1) == 0) continue;
    any = true;
    const auto is = [token](int32_t id) { return id == static_cast<int32_t>(token); };
    more = std::none_of(eos_token_ids_.begin(), eos_token_ids_.end(), is) &&
           std::none_of(p.stop_token_ids.begin(), p.stop_token_ids.end(), is);
  }
  // A bias so large that nothing finite may be left is for the host's sampler to decide on.
  return any && (more || !TooEarly(task)) &&
         std::all_of(p.logit_bias.begin(), p.logit_bias.end(),
                     [](const llmc_logit_bias& b) { return std::fabs(b.bias) < kLargeBias; });
}

bool SampleJobs::Room(const SampleTask& task) const {
  const size_t told = task.params != nullptr && task.params->num_logprobs >= 0 ? 1 : 0;
  if (jobs_.size() + 1 + told > sizes_.max_jobs) return false;
  if (task.params == nullptr || !Modifies(task)) return true;
  const uint64_t edits = task.params->logit_bias.size() + eos_token_ids_.size() + task.params->stop_token_ids.size() +
                         std::min(task.context.num_tokens, sizes_.vocab);
  return num_copies_ < sizes_.max_copies && num_edits_ + edits <= sizes_.max_edits &&
         num_changes_ + 3 * edits <= sizes_.max_changes;
}

size_t SampleJobs::List(const std::vector<SampleTask>& tasks, size_t first) {
  jobs_.clear();
  host_.clear();
  num_copies_ = num_edits_ = num_changes_ = num_mask_words_ = 0;
  size_t index = first;
  for (; index < tasks.size(); ++index) {
    const SampleTask& task = tasks[index];
    if (task.unwanted) continue;
    if (!Takes(task)) {
      host_.push_back(index);
      continue;
    }
    if (!Room(task)) break;
    if (task.params == nullptr) {
      ListTell(task, index, SIZE_MAX);
    } else {
      ListDraw(task, index);
      if (task.params->num_logprobs >= 0) ListTell(task, index, jobs_.size() - 1);
    }
  }
  WriteUpload();
  return index;
}

void SampleJobs::ListDraw(const SampleTask& task, size_t index) {
  const SamplingParams& p = *task.params;
  Job job{index, Kind::kBest, {}, 0, 1, SIZE_MAX};
  job.words[kRow] = static_cast<int32_t>(task.row);
  job.words[kTold] = -1;
  job.words[kMask] = -1;
  if (Modifies(task)) Modify(task, &job);
  if (p.temperature >= kGreedyBelow && p.top_k != 1) {
    const bool top_k = p.top_k > 0 && static_cast<uint32_t>(p.top_k) < sizes_.vocab;
    const bool whole = !top_k && p.top_p >= 1.0f && p.min_p <= 0.0f;
    job.kind = whole ? Kind::kDraw : Kind::kTop;
    job.words[kScale] = BitsOf(1.0f / p.temperature);
    job.words[kMinP] = BitsOf(p.min_p);
    job.words[kCount] = whole ? 0 : top_k ? p.top_k : static_cast<int32_t>(sizes_.candidates);
    job.words[kFlags] = (top_k ? kTopK : 0) | (p.top_p < 1.0f ? kTopP : 0) | (!top_k && p.top_p < 1.0f ? kMass : 0);
    job.uniform = UniformFromKey(p.seed, task.context.output_index, task.context.num_tokens);
    job.top_p = static_cast<double>(p.top_p);
  }
  jobs_.push_back(job);
}

void SampleJobs::ListTell(const SampleTask& task, size_t index, size_t from) {
  const uint32_t num_top = task.params == nullptr ? task.num_top : static_cast<uint32_t>(task.params->num_logprobs);
  Job job{index, Kind::kTell, {}, 0, 1, from};
  job.words[kRow] = static_cast<int32_t>(task.row);
  job.words[kToken] = task.token;
  job.words[kMask] = -1;
  job.words[kScale] = BitsOf(1.0f);
  job.words[kCount] = static_cast<int32_t>(std::min(num_top, sizes_.vocab));
  job.words[kFlags] = kTells;
  jobs_.push_back(job);
}

void SampleJobs::AddChange(int32_t token, uint32_t kind, float value) {
  int32_t& edit = edit_of_[static_cast<uint32_t>(token)];
  if (edit < 0) {
    edit = static_cast<int32_t>(edited_.size());
    edited_.push_back(token);
  }
  changes_.push_back({static_cast<uint32_t>(edit), kind, value});
}

// Lists changes of logits in the order of Sampler::Modify: bias, stops, repetition, counts. The mask is applied before
// them.
void SampleJobs::Modify(const SampleTask& task, Job* job) {
  const SamplingParams& p = *task.params;
  const SampleContext& context = task.context;
  edited_.clear();
  changes_.clear();
  for (const llmc_logit_bias& b : p.logit_bias) AddChange(b.token_id, kAdd, b.bias);
  if (TooEarly(task)) StopsEarly(task);
  if (p.repetition_penalty != 1.0f) {
    for (uint32_t i = 0; i < context.num_tokens; ++i) {
      if (counts_[static_cast<uint32_t>(context.tokens[i])]++ == 0) {
        AddChange(context.tokens[i], kRepeat, p.repetition_penalty);
      }
    }
    for (uint32_t i = 0; i < context.num_tokens; ++i) counts_[static_cast<uint32_t>(context.tokens[i])] = 0;
  }
  if (p.presence_penalty != 0.0f || p.frequency_penalty != 0.0f) {
    for (uint32_t i = context.num_prompt; i < context.num_tokens; ++i) {
      ++counts_[static_cast<uint32_t>(context.tokens[i])];
    }
    for (uint32_t i = context.num_prompt; i < context.num_tokens; ++i) {
      int32_t& count = counts_[static_cast<uint32_t>(context.tokens[i])];
      if (count == 0) continue;
      AddChange(context.tokens[i], kSubtract, p.frequency_penalty * static_cast<float>(count));
      AddChange(context.tokens[i], kSubtract, p.presence_penalty);
      count = 0;
    }
  }
  // One record per logit, with its changes in a row.
  std::stable_sort(changes_.begin(), changes_.end(), [](const Change& a, const Change& b) { return a.edit < b.edit; });
  int32_t* edits = Words(SampleOperand::kEdits) + size_t{num_edits_} * kEditWords;
  for (size_t i = 0; i < edited_.size(); ++i) {
    edit_of_[static_cast<uint32_t>(edited_[i])] = -1;
    const int32_t record[kEditWords] = {static_cast<int32_t>(num_copies_), edited_[i], 0, 0};
    std::copy_n(record, kEditWords, edits + i * kEditWords);
  }
  int32_t* changes = Words(SampleOperand::kChanges) + size_t{num_changes_} * kChangeWords;
  for (size_t i = 0; i < changes_.size(); ++i) {
    int32_t* record = edits + size_t{changes_[i].edit} * kEditWords;
    if (record[3]++ == 0) record[2] = static_cast<int32_t>(num_changes_ + i);
    changes[i * kChangeWords] = static_cast<int32_t>(changes_[i].kind);
    changes[i * kChangeWords + 1] = BitsOf(changes_[i].value);
  }
  num_edits_ += static_cast<uint32_t>(edited_.size());
  num_changes_ += static_cast<uint32_t>(changes_.size());
  if (context.mask != nullptr) {
    const uint32_t words = std::min(context.num_mask_words, Ceil(sizes_.vocab, 32));
    job->words[kMask] = static_cast<int32_t>(num_mask_words_);
    job->words[kMaskWords] = static_cast<int32_t>(words);
    std::memcpy(Words(SampleOperand::kMasks) + num_mask_words_, context.mask, words * sizeof(uint32_t));
    num_mask_words_ += words;
  }
  job->words[kOwn] = static_cast<int32_t>(++num_copies_);
}

// Forbids stop tokens. Takes has checked that another token is left to choose.
void SampleJobs::StopsEarly(const SampleTask& task) {
  for (const int32_t id : eos_token_ids_) {
    if (id >= 0 && static_cast<uint32_t>(id) < sizes_.vocab) AddChange(id, kForbid, 0.0f);
  }
  for (const int32_t id : task.params->stop_token_ids) AddChange(id, kForbid, 0.0f);
}

// Orders jobs by kind, so that those of a kernel are side by side.
void SampleJobs::WriteUpload() {
  place_.resize(jobs_.size());
  int32_t* words = Words(SampleOperand::kJobs);
  double* numbers = reinterpret_cast<double*>(upload_.data() + sizes_.offset(SampleOperand::kNumbers));
  uint32_t next = 0;
  for (uint32_t kind = 0; kind < 4; ++kind) {
    first_of_[kind] = next;
    for (size_t i = 0; i < jobs_.size(); ++i) {
      if (jobs_[i].kind == static_cast<Kind>(kind)) place_[i] = next++;
    }
  }
  first_of_[4] = next;
  for (size_t i = 0; i < jobs_.size(); ++i) {
    Job& job = jobs_[i];
    if (job.kind == Kind::kTell) job.words[kTold] = job.from == SIZE_MAX ? -1 : static_cast<int32_t>(place_[job.from]);
    std::copy_n(job.words, kJobWords, words + place_[i] * kJobWords);
    numbers[place_[i] * 2] = job.uniform;
    numbers[place_[i] * 2 + 1] = job.top_p;
  }
  const int32_t scalars[8] = {static_cast<int32_t>(next), static_cast<int32_t>(num_edits_),
                              static_cast<int32_t>(first_of_[1]), static_cast<int32_t>(first_of_[2])};
  std::memcpy(upload_.data(), scalars, sizeof(scalars));
  used_upload_ = sizes_.offset(SampleOperand::kNumbers) + uint64_t{next} * 2 * sizeof(double);
  if (num_edits_ != 0) {
    used_upload_ = sizes_.offset(SampleOperand::kChanges) + uint64_t{num_changes_} * kChangeWords * sizeof(int32_t);
  }
  if (num_mask_words_ != 0) {
    used_upload_ = sizes_.offset(SampleOperand::kMasks) + uint64_t{num_mask_words_} * sizeof(int32_t);
  }
}

// A task that draws lists its draw first.
uint32_t SampleJobs::ResultOf(size_t task) const {
  const auto before = [](const Job& job, size_t of) { return job.task < of; };
  const auto job = std::lower_bound(jobs_.begin(), jobs_.end(), task, before);
  return static_cast<uint32_t>(place_[static_cast<size_t>(job - jobs_.begin())]);
}

uint32_t SampleJobs::groups(SampleStage stage) const {
  const uint32_t jobs = first_of_[4], pieces = sizes_.pieces;
  switch (stage) {
    case SampleStage::kMask: return num_copies_ == 0 ? 0 : jobs * pieces;
    case SampleStage::kEdit: return Ceil(num_edits_, 64);
    case SampleStage::kScan: return jobs * pieces;
    case SampleStage::kSum: return (jobs - first_of_[1]) * pieces;
    case SampleStage::kBest: return first_of_[1];
    case SampleStage::kDraw: return first_of_[2] - first_of_[1];
    case SampleStage::kTop: return jobs - first_of_[2];
    case SampleStage::kRank: return first_of_[3] == jobs ? 0 : (jobs - first_of_[2]) * pieces;
    case SampleStage::kFeed: return 0;
  }
  return 0;
}

uint64_t SampleJobs::drawn_bytes() const { return uint64_t{first_of_[4]} * kResultWords * sizeof(int32_t); }

uint64_t SampleJobs::told_bytes() const {
  if (first_of_[3] == first_of_[4]) return 0;
  return sizes_.offset(SampleOperand::kCounts) - told_begin() +
         uint64_t{first_of_[4]} * sizes_.pieces * sizeof(int32_t);
}

void SampleJobs::Finish(const std::vector<SampleTask>& tasks, const unsigned char* result,
                        std::vector<SampleOutcome>* outcomes, std::vector<size_t>* host) const {
  host->insert(host->end(), host_.begin(), host_.end());
  const auto* words = reinterpret_cast<const int32_t*>(result + sizes_.offset(SampleOperand::kResults));
  const auto* totals = reinterpret_cast<const double*>(result + sizes_.offset(SampleOperand::kTotals));
  const auto* counts = reinterpret_cast<const int32_t*>(result + sizes_.offset(SampleOperand::kCounts));
  for (size_t i = 0; i < jobs_.size(); ++i) {
    const Job& job = jobs_[i];
    const int32_t* found = words + place_[i] * kResultWords;
    SampleOutcome& outcome = (*outcomes)[job.task];
    if (job.kind != Kind::kTell) {
      outcome.status = Status::Ok();
      outcome.result.token = found[kFound];
      outcome.result.logprob = 0;
      outcome.result.rank = outcome.result.num_top = 0;
      if (found[kStatus] != 0) host->push_back(job.task);
      continue;
    }
    // If the token is drawn by the host, so is all that is told about it.
    if (job.from != SIZE_MAX && words[place_[job.from] * kResultWords + kStatus] != 0) continue;
    if (found[kStatus] != 0) {
      host->push_back(job.task);
      continue;
    }
    SampleResult& to = outcome.result;
    outcome.status = Status::Ok();
    if (tasks[job.task].params == nullptr) to.token = tasks[job.task].token;
    const double log_sum = std::log(totals[place_[i]]) + FloatOf(found[kLargest]);
    to.logprob = static_cast<float>(FloatOf(found[kLogit]) - log_sum);
    to.rank = 1;
    for (uint32_t piece = 0; piece < sizes_.pieces; ++piece) {
      to.rank += static_cast<uint32_t>(counts[place_[i] * sizes_.pieces + piece]);
    }
    to.num_top = static_cast<uint32_t>(found[kNum]);
    for (uint32_t top = 0; top < to.num_top; ++top) {
      to.top_token_ids[top] = found[kIds + top];
      to.top_logprobs[top] = static_cast<float>(FloatOf(found[kLogits + top]) - log_sum);
    }
  }
}

}  // namespace llmc
