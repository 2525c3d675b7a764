// Models that give vectors: whole prompts in a step or chunks of them, what is refused, and how requests end.
#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "support/engine_harness.h"

namespace {

using namespace llmc;
using namespace llmc_test;

constexpr float kUntouched = 1234.5f;

// The device gives rows of logits; here they are the vectors.
ModelShape Vectors(bool whole_prompts) {
  ModelShape m = Shape(4, 32, 4);
  m.vector_width = kVocab;
  m.whole_prompts = whole_prompts;
  for (const uint32_t tokens : {8u, 16u, whole_prompts ? 32u : 16u}) AddGraph(&m, Phase::kPrefill, tokens, 4, 8);
  return m;
}

std::vector<float> Expected(const std::vector<int32_t>& prompt) {
  uint64_t fold = 0;
  for (size_t p = 0; p < prompt.size(); ++p) {
    fold = Fold(fold, TokenHash(fold, prompt[p], static_cast<uint32_t>(p)));
  }
  std::vector<float> vector(kVocab);
  LogitsOf(fold, kVocab, vector.data());
  return vector;
}

struct Asked {
  std::vector<int32_t> prompt;
  std::vector<float> vector = std::vector<float>(kVocab, kUntouched);
  uint64_t id = 0;
};

llmc_request RequestOf(Asked* asked, const llmc_sampling_params* sampling) {
  llmc_request r;
  llmc_request_init(&r, sizeof(r));
  r.prompt_token_ids = asked->prompt.data();
  r.num_prompt_tokens = asked->prompt.size();
  r.sampling = sampling;
  r.vector = asked->vector.data();
  r.vector_capacity = asked->vector.size();
  return r;
}

void SubmitAsked(Engine* engine, Asked* asked) {
  const llmc_sampling_params sampling = Params();
  const llmc_request r = RequestOf(asked, &sampling);
  CHECK_OK(engine->Submit(r, &asked->id));
}

// Until nothing is left; the last event of each request, of which there is one.
std::map<uint64_t, llmc_event> RunToEnd(Engine* engine) {
  std::map<uint64_t, llmc_event> ends;
  for (bool more = true; more;) {
    CHECK_OK(engine->Step(&more));
    CHECK_OK(engine->CheckIntegrity());
    llmc_event events[5];
    events[0].struct_size = sizeof(llmc_event);
    while (const uint64_t n = engine->Poll(events, 5)) {
      for (uint64_t i = 0; i < n; ++i) CHECK(ends.emplace(events[i].request_id, events[i]).second);
    }
  }
  return ends;
}

void TestPrompts(bool whole_prompts) {
  NullDevice* device = nullptr;
  auto engine = Make(Vectors(whole_prompts), 40, {}, &device);
  std::mt19937 rng(5);
  std::vector<Asked> all(60);
  for (Asked& asked : all) {
    asked.prompt.resize(1 + rng() % 32);
    for (int32_t& token : asked.prompt) token = static_cast<int32_t>(rng() % kVocab);
  }
  all[7].prompt = all[3].prompt;
  for (Asked& asked : all) SubmitAsked(engine.get(), &asked);
  const auto ends = RunToEnd(engine.get());
  for (const Asked& asked : all) {
    const llmc_event& end = ends.at(asked.id);
    CHECK_EQ(end.kind, static_cast<uint32_t>(LLMC_EVENT_FINISHED));
    CHECK_EQ(end.finish_reason, static_cast<uint32_t>(LLMC_FINISH_STOP));
    CHECK_EQ(end.num_prompt_tokens, asked.prompt.size());
    CHECK_EQ(end.num_output_tokens, 0u);
    CHECK(end.first_token_ns >= end.first_scheduled_ns && end.first_scheduled_ns > 0);
    CHECK(asked.vector == Expected(asked.prompt));
  }
  const llmc_engine_stats stats = engine->Stats();
  CHECK_EQ(stats.num_finished, all.size());
  CHECK_EQ(stats.num_bucket_misses, 0u);
  CHECK_EQ(stats.num_decode_steps, 0u);
  CHECK_EQ(stats.output_tokens, 0u);
  CHECK_EQ(stats.num_free_blocks, stats.num_blocks);
  if (whole_prompts) CHECK_EQ(stats.prefix_hit_tokens + stats.num_cached_blocks, 0u);
  // Nothing is computed twice, and no prompt that must be whole is taken apart.
  if (whole_prompts) CHECK_EQ(stats.scheduled_tokens, stats.prompt_tokens);
  CHECK(device->max_tokens_seen <= (whole_prompts ? 32u : 16u));
}

void TestRefusals() {
  auto engine = Make(Vectors(true), 40, {});
  Asked asked;
  asked.prompt.assign(33, 1);
  llmc_sampling_params sampling = Params();
  uint64_t id = 0;
  const auto refused = [&](const llmc_request& r, const char* why) {
    const Status status = engine->Submit(r, &id);
    CHECK_EQ(status.code, LLMC_ERR_INVALID_ARGUMENT);
    CHECK(status.message.find(why) != std::string::npos);
  };
  refused(RequestOf(&asked, &sampling), "has 33 tokens but at most 32 fit max_model_len");
  asked.prompt.assign(5, 1);
  llmc_request r = RequestOf(&asked, &sampling);
  r.vector = nullptr;
  refused(r, "gives vectors and writes no text");
  r = RequestOf(&asked, &sampling);
  r.vector_capacity = kVocab - 1;
  refused(r, "vector_capacity is 52");
  r = RequestOf(&asked, &sampling);
  r.num_prompt_logprobs = 0;
  refused(r, "draws no tokens");
  sampling.n = 2;
  refused(RequestOf(&asked, &sampling), "draws no tokens");
  sampling.n = 1;
  engine = Make(Usual(), 40, {});
  refused(RequestOf(&asked, &sampling), "writes text; leave vector out");
  // A step of at most 8 tokens holds no more of a prompt.
  EngineOptions few;
  few.max_tokens_per_step = 8;
  engine = Make(Vectors(true), 40, few);
  Asked longer, shorter;
  longer.prompt.assign(9, 1);
  shorter.prompt.assign(8, 1);
  SubmitAsked(engine.get(), &longer);
  SubmitAsked(engine.get(), &shorter);
  const auto ends = RunToEnd(engine.get());
  CHECK_EQ(ends.at(longer.id).error_code, LLMC_ERR_BUCKET_MISS);
  CHECK(longer.vector == std::vector<float>(kVocab, kUntouched));
  CHECK(shorter.vector == Expected(shorter.prompt));
}

void TestEnds() {
  NullDevice* device = nullptr;
  auto engine = Make(Vectors(false), 40, {}, &device);
  Asked cancelled, poisoned, sound;
  for (Asked* asked : {&cancelled, &poisoned, &sound}) asked->prompt = {3, 1, 4, 1, 5};
  SubmitAsked(engine.get(), &cancelled);
  CHECK_OK(engine->Cancel(cancelled.id));
  CHECK_EQ(RunToEnd(engine.get()).at(cancelled.id).finish_reason, static_cast<uint32_t>(LLMC_FINISH_CANCELLED));
  device->poison = true;
  SubmitAsked(engine.get(), &poisoned);
  CHECK_EQ(RunToEnd(engine.get()).at(poisoned.id).error_code, LLMC_ERR_NOT_FINITE);
  for (const Asked* asked : {&cancelled, &poisoned}) CHECK(asked->vector == std::vector<float>(kVocab, kUntouched));
  device->poison = false;
  SubmitAsked(engine.get(), &sound);
  const auto ends = RunToEnd(engine.get());
  CHECK_EQ(ends.at(sound.id).num_cached_tokens, 0u);  // nobody begins with what may not be finite
  CHECK(sound.vector == Expected(sound.prompt));
}

}  // namespace

int main() {
  for (const bool late : {false, true}) {
    NullDevice::late = late;
    for (const bool draws : {false, true}) {
      NullDevice::draws = draws;
      for (const bool whole_prompts : {false, true}) TestPrompts(whole_prompts);
      TestRefusals();
      TestEnds();
    }
  }
  return Finish("vector_test");
}
