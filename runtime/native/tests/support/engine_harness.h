// Shared by the engine's tests: models, requests, and a reference generator without batching, chunking, prefix cache or
// preemption.
#pragma once
#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "support/check.h"
#include "support/null_device.h"

namespace llmc_test {

using namespace llmc;

constexpr int32_t kVocab = 53, kEos = 7;

// One token of a prompt with its logprob.
struct Scored {
  int32_t token;
  float logprob;
  uint32_t rank;
  std::vector<std::pair<int32_t, float>> top;
  bool operator==(const Scored& o) const {
    return token == o.token && logprob == o.logprob && rank == o.rank && top == o.top;
  }
};

struct Output {
  std::vector<Scored> prompt;
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  uint32_t reason = 0;
  int32_t stop = -1;
  int terminal = 0;
  uint32_t kind = 0, num_cached = 0;
  int32_t error = 0;
  llmc_event end{};
};

inline ModelShape Shape(int32_t block_size, int32_t max_len, int32_t max_seqs) {
  ModelShape m{};
  m.num_layers = 1;
  m.block_size = block_size;
  m.vocab_size = kVocab;
  m.max_model_len = max_len;
  m.max_num_seqs = max_seqs;
  m.eos_token_ids = {kEos};
  m.kv_block_bytes = 64;
  return m;
}

inline void AddGraph(ModelShape* m, Phase phase, uint32_t tokens, uint32_t seqs, uint32_t blocks) {
  m->graphs.push_back({phase, seqs, tokens / std::max(seqs, 1u), tokens, seqs, seqs, blocks});
}

// Rows in place of tokens, each of equal floats.
struct Placed {
  uint32_t first;
  std::vector<float> values;
  uint8_t identity;
  uint32_t width = 0;  // of an image whose rows lie row by row on two axes; 0: rows count as tokens

  uint32_t advance() const {
    const auto count = static_cast<uint32_t>(values.size());
    return width == 0 ? count : std::max(std::min(width, count), (count + width - 1) / width);
  }
  std::vector<int32_t> positions() const {
    std::vector<int32_t> axes;
    for (uint32_t i = 0; width > 0 && i < values.size(); ++i) {
      axes.insert(axes.end(), {0, static_cast<int32_t>(i / width), static_cast<int32_t>(i % width)});
    }
    return axes;
  }
};

struct Job {
  std::vector<int32_t> prompt;
  std::vector<Placed> placed;
  llmc_sampling_params params;
  std::vector<int32_t> stops;
  std::vector<llmc_logit_bias> biases;
  int32_t priority = 0;
  bool guided = false;
  int32_t num_prompt_logprobs = -1;
  uint64_t deadline_ns = 0;
  uint64_t id = 0;
  bool cancelled = false;
};

inline llmc_sampling_params Params() {
  llmc_sampling_params p;
  llmc_sampling_params_init(&p, sizeof(p));
  p.temperature = 0;
  p.has_seed = 1;
  return p;
}

// The tokens of a text as the model sees them: rows in place of tokens, and rotary positions, give numbers of their own.
inline std::vector<int32_t> SeenBy(const Job& job, std::vector<int32_t> tokens) {
  std::vector<int32_t> axes;
  int32_t next = 0;  // rotary position
  const auto add_tokens = [&](size_t end) {
    for (; axes.size() < end * kRopeAxes; ++next) axes.insert(axes.end(), kRopeAxes, next);
  };
  for (const Placed& one : job.placed) {
    for (size_t i = 0; i < one.values.size(); ++i) tokens[one.first + i] = SeenRow(one.values[i]);
    if (one.width == 0) continue;
    add_tokens(one.first);
    for (const int32_t position : one.positions()) axes.push_back(next + position);
    next += static_cast<int32_t>(one.advance());
  }
  add_tokens(tokens.size());
  for (size_t p = 0; p < tokens.size(); ++p) {
    tokens[p] = SeenAt(tokens[p], static_cast<int32_t>(p), &axes[p * kRopeAxes]);
  }
  return tokens;
}

constexpr uint32_t kRowWidth = 3;

inline Status Submit(Engine* engine, Job* job) {
  llmc_request r;
  llmc_request_init(&r, sizeof(r));
  r.priority = job->priority;
  r.prompt_token_ids = job->prompt.data();
  r.num_prompt_tokens = job->prompt.size();
  std::vector<std::vector<float>> rows;
  std::vector<std::vector<int32_t>> positions;
  std::vector<llmc_placed_rows> placed;
  for (const Placed& one : job->placed) {
    rows.emplace_back();
    for (const float value : one.values) rows.back().insert(rows.back().end(), kRowWidth, value);
    llmc_placed_rows to{};
    to.struct_size = sizeof(to);
    to.num_rows = static_cast<uint32_t>(one.values.size());
    to.first = one.first;
    to.rows = rows.back().data();
    to.identity[31] = one.identity;
    positions.push_back(one.positions());
    if (one.width > 0) to.positions = positions.back().data();
    to.advance = one.advance();
    placed.push_back(to);
  }
  r.placed = placed.data();
  r.num_placed = placed.size();
  r.guided = job->guided;
  r.num_prompt_logprobs = job->num_prompt_logprobs;
  r.deadline_ns = job->deadline_ns;
  llmc_sampling_params sampling = job->params;
  sampling.stop_token_ids = job->stops.data();
  sampling.num_stop_token_ids = job->stops.size();
  sampling.logit_bias = job->biases.data();
  sampling.num_logit_bias = job->biases.size();
  r.sampling = &sampling;
  return engine->Submit(r, &job->id);
}

// Mask of the token after these: about a quarter of the vocabulary, and one token at least.
inline std::vector<uint32_t> MaskOf(const std::vector<int32_t>& tokens) {
  uint64_t hash = 0;
  for (int32_t t : tokens) hash = Mix(hash + static_cast<uint64_t>(t));
  std::vector<uint32_t> words((kVocab + 31) / 32);
  for (int32_t t = 0; t < kVocab; ++t) {
    if (Mix(hash + static_cast<uint64_t>(t)) % 4 == 0) words[t / 32] |= 1u << (t % 32);
  }
  words[hash % kVocab / 32] |= 1u << (hash % kVocab % 32);
  return words;
}

inline Scored MakeScored(int32_t token, float logprob, uint32_t rank, uint32_t num_top, const int32_t* ids,
                         const float* top) {
  Scored s{token, logprob, rank, {}};
  for (uint32_t i = 0; i < num_top; ++i) s.top.push_back({ids[i], top[i]});
  return s;
}

// Output that the request must produce: computed one sequence at a time, without a cache.
inline Output Reference(const Job& job, uint32_t index, uint32_t max_len) {
  SamplingParams params;
  llmc_sampling_params c = job.params;
  c.stop_token_ids = job.stops.data();
  c.num_stop_token_ids = job.stops.size();
  c.logit_bias = job.biases.data();
  c.num_logit_bias = job.biases.size();
  CHECK_OK(MakeSamplingParams(c, kVocab, &params));
  Sampler sampler(kVocab, {kEos});
  Output out;
  std::vector<int32_t> tokens = job.prompt;
  uint64_t fold = 0;
  size_t folded = 0;
  std::vector<float> logits(kVocab);
  for (;;) {
    for (; folded < tokens.size(); ++folded) {
      if (job.num_prompt_logprobs >= 0 && index == 0 && folded > 0 && folded < job.prompt.size()) {
        LogitsOf(fold, kVocab, logits.data());
        SampleResult r;
        CHECK_OK(sampler.Score(logits.data(), tokens[folded], static_cast<uint32_t>(job.num_prompt_logprobs),
                               static_cast<uint32_t>(folded), &r));
        out.prompt.push_back(MakeScored(r.token, r.logprob, r.rank, r.num_top, r.top_token_ids, r.top_logprobs));
      }
      fold = Fold(fold, TokenHash(fold, SeenBy(job, tokens)[folded], static_cast<uint32_t>(folded)));
    }
    LogitsOf(fold, kVocab, logits.data());
    SampleResult r;
    SampleContext context{tokens.data(), static_cast<uint32_t>(tokens.size()), static_cast<uint32_t>(job.prompt.size()),
                          index};
    const std::vector<uint32_t> mask = MaskOf(tokens);
    if (job.guided) {
      context.mask = mask.data();
      context.num_mask_words = static_cast<uint32_t>(mask.size());
    }
    CHECK_OK(sampler.Sample(logits.data(), params, context, &r));
    if (job.guided) CHECK((mask[r.token / 32] >> (r.token % 32)) & 1);
    const bool stop =
        (!params.ignore_eos && r.token == kEos) || std::count(job.stops.begin(), job.stops.end(), r.token) > 0;
    if (stop) {
      out.reason = LLMC_FINISH_STOP;
      out.stop = r.token;
      return out;
    }
    tokens.push_back(r.token);
    out.tokens.push_back(r.token);
    out.logprobs.push_back(r.logprob);
    if (out.tokens.size() >= params.max_tokens || tokens.size() >= max_len) {
      out.reason = LLMC_FINISH_LENGTH;
      return out;
    }
  }
}

using Outputs = std::map<std::pair<uint64_t, uint32_t>, Output>;

// Continuations that wait for a mask.
using Needs = std::vector<std::pair<uint64_t, uint32_t>>;

inline void Drain(Engine* engine, Outputs* outputs, Needs* needs = nullptr) {
  llmc_event events[7];
  events[0].struct_size = sizeof(llmc_event);
  while (uint64_t n = engine->Poll(events, 7)) {
    for (uint64_t i = 0; i < n; ++i) {
      const llmc_event& e = events[i];
      Output& o = (*outputs)[{e.request_id, e.output_index}];
      CHECK_EQ(o.terminal, 0);
      if (e.kind == LLMC_EVENT_PROMPT_LOGPROBS) {
        CHECK(o.tokens.empty());
        CHECK_EQ(e.position, o.prompt.size() + 1);
        o.prompt.push_back(MakeScored(e.token_id, e.logprob, e.rank, e.num_top, e.top_token_ids, e.top_logprobs));
      } else if (e.kind == LLMC_EVENT_NEEDS_MASK) {
        if (CHECK(needs != nullptr)) needs->push_back({e.request_id, e.output_index});
      } else if (e.kind == LLMC_EVENT_TOKEN) {
        CHECK_EQ(e.position, e.num_prompt_tokens + o.tokens.size());
        o.tokens.push_back(e.token_id);
        o.logprobs.push_back(e.logprob);
      } else {
        ++o.terminal;
        o.kind = e.kind;
        o.reason = e.finish_reason;
        o.stop = e.token_id;
        o.error = e.error_code;
        o.num_cached = e.num_cached_tokens;
        o.end = e;
        CHECK_EQ(e.message[0] != 0, e.kind == LLMC_EVENT_FAILED);
        CHECK(e.arrival_ns > 0 && e.arrival_ns <= e.time_ns);
        if (e.first_scheduled_ns) CHECK(e.arrival_ns <= e.first_scheduled_ns);
        if (e.first_token_ns) CHECK(e.first_scheduled_ns <= e.first_token_ns && e.first_token_ns <= e.time_ns);
        if (!o.tokens.empty()) CHECK(e.first_token_ns > 0);
      }
      const bool stopped = e.kind == LLMC_EVENT_FINISHED && e.finish_reason == LLMC_FINISH_STOP;
      CHECK_EQ(e.num_output_tokens, o.tokens.size() + stopped);
      if (stopped) CHECK(e.token_id >= 0 && e.first_token_ns > 0);
      if (stopped) CHECK_EQ(e.position, e.num_prompt_tokens + o.tokens.size());
    }
  }
}

// Sets the masks that a continuation needs, along the engine's guesses. A request that has ended meanwhile needs none.
inline void SetMask(Engine* engine, uint64_t id, uint32_t index, std::vector<int32_t> prompt,
                    const std::vector<int32_t>& out) {
  prompt.insert(prompt.end(), out.begin(), out.end());
  int32_t guesses[LLMC_MAX_SPECULATE_TOKENS + 1];
  uint64_t count = 0, ahead = 0;
  Status status = engine->GetGuesses(id, index, guesses, LLMC_MAX_SPECULATE_TOKENS, &count);
  std::vector<uint32_t> mask = MaskOf(prompt), words = mask;
  guesses[count++] = kEos + 1;  // a guess of the host
  for (; ahead < std::min<uint64_t>(count, LLMC_MAX_SPECULATE_TOKENS) &&
         (mask[guesses[ahead] / 32] >> guesses[ahead] % 32 & 1) != 0;
       ++ahead) {
    prompt.push_back(guesses[ahead]);
    mask = MaskOf(prompt);
    words.insert(words.end(), mask.begin(), mask.end());
  }
  if (status.ok()) status = engine->SetTokenMasks(id, index, words.data(), mask.size(), guesses, ahead);
  if (status.code != LLMC_ERR_NOT_FOUND) CHECK_OK(status);
}

inline std::unique_ptr<Engine> Make(const ModelShape& shape, uint32_t blocks, const EngineOptions& options,
                                    NullDevice** device = nullptr) {
  auto d = std::make_unique<NullDevice>(shape, blocks);
  if (device) *device = d.get();
  std::unique_ptr<Engine> engine;
  CHECK_OK(Engine::Create(std::move(d), options, &engine));
  return engine;
}

// An engine with a draft that guesses the model's tokens, except for `wrong` per cent.
inline std::unique_ptr<Engine> MakeDrafted(const ModelShape& shape, uint32_t blocks, const EngineOptions& options,
                                           const ModelShape& draft_shape, uint32_t draft_blocks, uint32_t wrong,
                                           NullDevice** device = nullptr, NullDevice** draft = nullptr) {
  auto d = std::make_unique<NullDevice>(shape, blocks), other = std::make_unique<NullDevice>(draft_shape, draft_blocks);
  other->wrong = wrong;
  if (device) *device = d.get();
  if (draft) *draft = other.get();
  std::unique_ptr<Engine> engine;
  CHECK_OK(Engine::Create(std::move(d), options, &engine, std::move(other)));
  return engine;
}

inline void RunAll(Engine* engine, Outputs* outputs, int limit = 100000) {
  for (bool more = true; more && limit > 0; --limit) {
    CHECK_OK(engine->Step(&more));
    CHECK_OK(engine->CheckIntegrity());
    Drain(engine, outputs);
  }
  CHECK(limit > 0);
}

// Whether the error of a failed continuation has `words`.
inline bool Says(const Output& output, const char* words) { return std::strstr(output.end.message, words) != nullptr; }

inline void Compare(const Output& got, const Output& want) {
  CHECK_EQ(got.terminal, 1);
  CHECK_EQ(got.kind, static_cast<uint32_t>(LLMC_EVENT_FINISHED));
  CHECK(got.tokens == want.tokens);
  CHECK(got.prompt == want.prompt);
  CHECK(got.logprobs == want.logprobs);
  CHECK_EQ(got.reason, want.reason);
  CHECK_EQ(got.stop, want.stop);
}

inline ModelShape Usual() {
  ModelShape m = Shape(4, 64, 8);
  AddGraph(&m, Phase::kPrefill, 8, 4, 16);
  AddGraph(&m, Phase::kPrefill, 16, 4, 16);
  for (uint32_t b : {1u, 2u, 4u, 8u}) AddGraph(&m, Phase::kDecode, b, b, 16);
  return m;
}

inline Job Simple(uint32_t length, uint32_t max_tokens) {
  Job j;
  for (uint32_t i = 0; i < length; ++i) j.prompt.push_back(static_cast<int32_t>((i * 11 + 3) % kVocab));
  j.params = Params();
  j.params.ignore_eos = 1;
  j.params.max_tokens = max_tokens;
  return j;
}

}  // namespace llmc_test
