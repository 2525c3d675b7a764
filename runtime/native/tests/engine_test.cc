// The engine over a null device: whatever the batching, chunking, prefix hits and preemptions, each request's output
// equals that of a generator that knows nothing of any of these.
#include "engine.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <random>
#include <thread>

#include "check.h"
#include "null_device.h"

using namespace llmc;
using llmc_test::NullDevice;

namespace {

constexpr int32_t kVocab = 53, kEos = 7;

struct Output {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  uint32_t reason = 0;
  int32_t stop = -1;
  int terminal = 0;
  uint32_t kind = 0, num_cached = 0;
  int32_t error = 0;
};

ModelShape Shape(int32_t block_size, int32_t max_len, int32_t max_seqs) {
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

void AddGraph(ModelShape* m, Phase phase, uint32_t tokens, uint32_t seqs, uint32_t blocks) {
  m->graphs.push_back({phase, seqs, tokens / std::max(seqs, 1u), tokens, seqs, seqs, blocks});
}

struct Job {
  std::vector<int32_t> prompt;
  llmc_sampling_params params;
  std::vector<int32_t> stops;
  int32_t priority = 0;
  uint64_t id = 0;
  bool cancelled = false;
};

llmc_sampling_params Params() {
  llmc_sampling_params p{};
  p.struct_size = sizeof(p);
  p.n = 1;
  p.max_tokens = 16;
  p.top_p = 1;
  p.repetition_penalty = 1;
  p.has_seed = 1;
  p.num_logprobs = -1;
  return p;
}

Status Submit(Engine* engine, Job* job) {
  llmc_request r{};
  r.struct_size = sizeof(r);
  r.priority = job->priority;
  r.prompt_token_ids = job->prompt.data();
  r.num_prompt_tokens = job->prompt.size();
  r.sampling = job->params;
  r.num_prompt_logprobs = -1;
  r.sampling.stop_token_ids = job->stops.data();
  r.sampling.num_stop_token_ids = job->stops.size();
  return engine->Submit(r, &job->id);
}

// What the request must produce: one sequence at a time, no cache.
Output Reference(const Job& job, uint32_t index, uint32_t max_len) {
  SamplingParams params;
  llmc_sampling_params c = job.params;
  c.stop_token_ids = job.stops.data();
  c.num_stop_token_ids = job.stops.size();
  CHECK_OK(MakeSamplingParams(c, kVocab, 0, &params));
  Sampler sampler(kVocab, {kEos});
  Output out;
  std::vector<int32_t> tokens = job.prompt;
  uint64_t fold = 0;
  size_t folded = 0;
  std::vector<float> logits(kVocab);
  for (;;) {
    for (; folded < tokens.size(); ++folded) {
      fold = llmc_test::Fold(fold, llmc_test::TokenHash(fold, tokens[folded], static_cast<uint32_t>(folded)));
    }
    llmc_test::LogitsOf(fold, kVocab, logits.data());
    SampleResult r;
    CHECK_OK(sampler.Sample(logits.data(), params,
                            {tokens.data(), static_cast<uint32_t>(tokens.size()),
                             static_cast<uint32_t>(job.prompt.size()), index},
                            &r));
    const bool stop = (!params.ignore_eos && r.token == kEos) ||
                      std::count(job.stops.begin(), job.stops.end(), r.token) > 0;
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

void Drain(Engine* engine, Outputs* outputs) {
  llmc_event events[7];
  events[0].struct_size = sizeof(llmc_event);
  while (uint64_t n = engine->Poll(events, 7)) {
    for (uint64_t i = 0; i < n; ++i) {
      const llmc_event& e = events[i];
      Output& o = (*outputs)[{e.request_id, e.output_index}];
      CHECK_EQ(o.terminal, 0);
      if (e.kind == LLMC_EVENT_TOKEN) {
        o.tokens.push_back(e.token_id);
        o.logprobs.push_back(e.logprob);
      } else {
        ++o.terminal;
        o.kind = e.kind;
        o.reason = e.finish_reason;
        o.stop = e.token_id;
        o.error = e.error_code;
        o.num_cached = e.num_cached_tokens;
      }
      CHECK_EQ(e.num_output_tokens, o.tokens.size());
    }
  }
}

std::unique_ptr<Engine> Make(const ModelShape& shape, uint32_t blocks, const EngineOptions& options,
                             NullDevice** device = nullptr) {
  auto d = std::make_unique<NullDevice>(shape, blocks);
  if (device) *device = d.get();
  std::unique_ptr<Engine> engine;
  CHECK_OK(Engine::Create(std::move(d), options, &engine));
  return engine;
}

void RunAll(Engine* engine, Outputs* outputs, int limit = 100000) {
  for (bool more = true; more && limit > 0; --limit) {
    CHECK_OK(engine->Step(&more));
    CHECK_OK(engine->CheckIntegrity());
    Drain(engine, outputs);
  }
  CHECK(limit > 0);
}

void Compare(const Output& got, const Output& want) {
  CHECK_EQ(got.terminal, 1);
  CHECK_EQ(got.kind, static_cast<uint32_t>(LLMC_EVENT_FINISHED));
  CHECK(got.tokens == want.tokens);
  CHECK(got.logprobs == want.logprobs);
  CHECK_EQ(got.reason, want.reason);
  CHECK_EQ(got.stop, want.stop);
}

// Random models, pools, options and requests.
uint64_t total_preemptions = 0, total_cached = 0, total_copies = 0, total_misses = 0, total_mixed = 0;

void Property(uint32_t seed) {
  std::mt19937 rng(seed);
  auto pick = [&](uint32_t low, uint32_t high) { return low + static_cast<uint32_t>(rng() % (high - low + 1)); };
  const uint32_t bs = pick(1, 6), max_len = pick(12, 60), max_seqs = pick(1, 8);
  const uint32_t all_blocks = (max_len + bs - 1) / bs;
  ModelShape shape = Shape(static_cast<int32_t>(bs), static_cast<int32_t>(max_len), static_cast<int32_t>(max_seqs));
  const uint32_t largest = pick(1, max_len + 10);
  for (uint32_t t = 1; t < largest; t += pick(1, 16)) AddGraph(&shape, Phase::kPrefill, t, pick(1, 4), pick(1, all_blocks));
  AddGraph(&shape, Phase::kPrefill, largest, pick(1, 4), all_blocks);
  for (uint32_t b = 1; b < max_seqs; b *= 2) AddGraph(&shape, Phase::kDecode, b, b, pick(1, all_blocks));
  if (pick(0, 3)) AddGraph(&shape, Phase::kDecode, max_seqs, max_seqs, all_blocks);
  if (pick(0, 2) == 0) AddGraph(&shape, Phase::kMixed, pick(2, 30), pick(2, max_seqs + 2), all_blocks);
  const bool tight = pick(0, 1);
  const uint32_t blocks = 1 + (tight ? pick(2, all_blocks + 3) : all_blocks * max_seqs);
  EngineOptions options;
  options.max_num_seqs = pick(0, 1) ? 0 : pick(1, max_seqs);
  options.max_tokens_per_step = pick(0, 1) ? 0 : pick(1, largest);
  options.prefix_cache = pick(0, 3) != 0;
  const uint32_t reach = std::min(max_len, (blocks - 1) * bs);
  if (reach < 2) return;

  NullDevice* device;
  auto engine = Make(shape, blocks, options, &device);
  std::vector<int32_t> common(reach);
  for (auto& t : common) t = static_cast<int32_t>(pick(0, kVocab - 1));
  std::vector<Job> jobs(pick(1, 14));
  Outputs outputs;
  size_t submitted = 0;
  int idle = 0;
  for (int step = 0; step < 20000 && idle < 2; ++step) {
    while (submitted < jobs.size() && pick(0, 2)) {
      Job& j = jobs[submitted++];
      const uint32_t length = pick(1, reach - 1), shared = pick(0, length);
      j.prompt.assign(common.begin(), common.begin() + shared);
      while (j.prompt.size() < length) j.prompt.push_back(static_cast<int32_t>(pick(0, kVocab - 1)));
      j.params = Params();
      j.params.n = pick(0, 3) ? 1 : pick(2, 4);
      j.params.max_tokens = pick(1, 30);
      j.params.min_tokens = pick(0, std::min(3u, j.params.max_tokens));
      j.params.temperature = pick(0, 1) ? 0.0f : 0.9f;
      if (pick(0, 2) == 0) j.params.top_k = static_cast<int32_t>(pick(1, 10));
      if (pick(0, 2) == 0) j.params.top_p = 0.8f;
      if (pick(0, 3) == 0) j.params.repetition_penalty = 1.3f;
      j.params.ignore_eos = pick(0, 1);
      j.params.seed = rng();
      j.params.num_logprobs = static_cast<int32_t>(pick(0, 3)) - 1;
      if (pick(0, 2) == 0) j.stops.push_back(static_cast<int32_t>(pick(0, kVocab - 1)));
      j.priority = static_cast<int32_t>(pick(0, 2));
      CHECK_OK(Submit(engine.get(), &j));
    }
    if (pick(0, 30) == 0 && submitted > 0) {
      Job& j = jobs[pick(0, static_cast<uint32_t>(submitted) - 1)];
      if (engine->Cancel(j.id).ok()) j.cancelled = true;
    }
    bool progressed;
    CHECK_OK(engine->Step(&progressed));
    CHECK_OK(engine->CheckIntegrity());
    Drain(engine.get(), &outputs);
    idle = progressed || submitted < jobs.size() ? 0 : idle + 1;
    if (device->last_graph < shape.graphs.size()) {
      total_mixed += shape.graphs[device->last_graph].phase == Phase::kMixed;
    }
  }
  CHECK_EQ(idle, 2);
  for (const Job& j : jobs) {
    for (uint32_t i = 0; i < j.params.n; ++i) {
      const Output& got = outputs[{j.id, i}];
      const Output want = Reference(j, i, reach);
      if (!j.cancelled) {
        Compare(got, want);
      } else {
        CHECK_EQ(got.terminal, 1);
        CHECK(got.tokens.size() <= want.tokens.size() &&
              std::equal(got.tokens.begin(), got.tokens.end(), want.tokens.begin()));
      }
    }
  }
  const llmc_engine_stats s = engine->Stats();
  CHECK(s.num_running == 0 && s.num_waiting == 0 && s.num_free_blocks == s.num_blocks);
  CHECK_EQ(s.num_finished, jobs.size());
  total_preemptions += s.num_preemptions;
  total_cached += s.cached_tokens;
  total_misses += s.num_bucket_misses;
  total_copies += device->copies;
}

ModelShape Usual() {
  ModelShape m = Shape(4, 64, 8);
  AddGraph(&m, Phase::kPrefill, 8, 4, 16);
  AddGraph(&m, Phase::kPrefill, 16, 4, 16);
  for (uint32_t b : {1u, 2u, 4u, 8u}) AddGraph(&m, Phase::kDecode, b, b, 16);
  return m;
}

Job Simple(uint32_t length, uint32_t max_tokens) {
  Job j;
  for (uint32_t i = 0; i < length; ++i) j.prompt.push_back(static_cast<int32_t>((i * 11 + 3) % kVocab));
  j.params = Params();
  j.params.ignore_eos = 1;
  j.params.max_tokens = max_tokens;
  return j;
}

void TestPrefixAndGraphs() {
  NullDevice* device;
  auto engine = Make(Usual(), 65, {}, &device);
  Job a = Simple(33, 3), b = Simple(33, 3), c = Simple(32, 3);
  Outputs outputs;
  CHECK_OK(Submit(engine.get(), &a));
  RunAll(engine.get(), &outputs);
  CHECK_EQ(engine->Stats().num_prefill_steps, 2u);  // 16 + 16, and a last token that a decode graph computes
  CHECK_EQ(engine->Stats().num_decode_steps, 3u);
  CHECK_OK(Submit(engine.get(), &b));
  CHECK_OK(Submit(engine.get(), &c));
  RunAll(engine.get(), &outputs);
  CHECK_EQ((outputs[{b.id, 0}].num_cached), 32u);
  CHECK_EQ((outputs[{c.id, 0}].num_cached), 28u);  // the last token is always computed
  for (const Job* j : {&a, &b, &c}) Compare(outputs[{j->id, 0}], Reference(*j, 0, 64));
  uint64_t sum = 0, valid = 0, padded = 0;
  for (const llmc_graph_stats& g : engine->GraphStats()) {
    sum += g.replays;
    valid += g.tokens;
    padded += g.padded_tokens;
  }
  const llmc_engine_stats stats = engine->Stats();
  CHECK_EQ(sum, stats.num_steps);
  CHECK_EQ(valid, stats.scheduled_tokens);
  CHECK_EQ(padded, stats.padded_tokens);
  CHECK_EQ(stats.prefix_query_tokens, 33u + 33u + 32u);
  CHECK_EQ(stats.prefix_hit_tokens, 32u + 28u);
}

void TestMissPolicy() {
  ModelShape m = Shape(4, 64, 4);
  AddGraph(&m, Phase::kPrefill, 16, 4, 16);
  AddGraph(&m, Phase::kDecode, 4, 4, 3);  // contexts up to 12
  for (bool strict : {false, true}) {
    EngineOptions options;
    options.error_on_miss = strict;
    auto engine = Make(m, 65, options);
    Job shorter = Simple(3, 6), longer = Simple(10, 8);
    CHECK_OK(Submit(engine.get(), &shorter));
    CHECK_OK(Submit(engine.get(), &longer));
    Outputs outputs;
    RunAll(engine.get(), &outputs);
    Compare(outputs[{shorter.id, 0}], Reference(shorter, 0, 64));
    if (!strict) {
      Compare(outputs[{longer.id, 0}], Reference(longer, 0, 64));
    } else {
      CHECK_EQ((outputs[{longer.id, 0}].kind), static_cast<uint32_t>(LLMC_EVENT_FAILED));
      CHECK_EQ((outputs[{longer.id, 0}].error), LLMC_ERR_BUCKET_MISS);
    }
    CHECK(engine->Stats().num_bucket_misses > 0);
  }
}

// A stream of prompts must not stop a running decode, nor decodes a new prompt.
void TestFairness() {
  auto engine = Make(Usual(), 129, {});
  Job first = Simple(4, 10);
  CHECK_OK(Submit(engine.get(), &first));
  std::vector<Job> flood(40, Simple(40, 2));
  Outputs outputs;
  bool progressed;
  CHECK_OK(engine->Step(&progressed));
  for (Job& j : flood) CHECK_OK(Submit(engine.get(), &j));
  for (int i = 0; i < 20; ++i) CHECK_OK(engine->Step(&progressed));
  Drain(engine.get(), &outputs);
  CHECK_EQ((outputs[{first.id, 0}].terminal), 1);
  CHECK_EQ((outputs[{flood[0].id, 0}].terminal), 1);
  RunAll(engine.get(), &outputs);
}

void TestFailures() {
  NullDevice* device;
  auto engine = Make(Usual(), 65, {}, &device);
  Job a = Simple(5, 4), b = Simple(9, 4);
  b.params.n = 3;
  CHECK_OK(Submit(engine.get(), &a));
  CHECK_OK(Submit(engine.get(), &b));
  device->fail_after = 2;
  bool progressed;
  CHECK_OK(engine->Step(&progressed));
  CHECK(!engine->Step(&progressed).ok());
  CHECK_OK(engine->CheckIntegrity());
  Outputs outputs;
  Drain(engine.get(), &outputs);
  CHECK_EQ((outputs[{a.id, 0}].kind), static_cast<uint32_t>(LLMC_EVENT_FAILED));
  for (uint32_t i = 0; i < 3; ++i) CHECK_EQ((outputs[{b.id, i}].terminal), 1);
  CHECK_EQ(engine->Stats().num_free_blocks, engine->Stats().num_blocks);
  // The engine serves on.
  Job c = Simple(9, 4);
  CHECK_OK(Submit(engine.get(), &c));
  RunAll(engine.get(), &outputs);
  Compare(outputs[{c.id, 0}], Reference(c, 0, 64));
  // Logits that are not numbers fail the request, not the engine.
  device->poison = true;
  Job d = Simple(9, 4);
  d.params.n = 2;
  CHECK_OK(Submit(engine.get(), &d));
  RunAll(engine.get(), &outputs);
  for (uint32_t i = 0; i < 2; ++i) {
    CHECK_EQ((outputs[{d.id, i}].kind), static_cast<uint32_t>(LLMC_EVENT_FAILED));
    CHECK_EQ((outputs[{d.id, i}].error), LLMC_ERR_INTERNAL);
  }
}

void TestValidation() {
  EngineOptions options;
  options.max_waiting = 2;
  auto engine = Make(Usual(), 65, options);
  auto refused = [&](Job j, const char* word) {
    Status s = Submit(engine.get(), &j);
    CHECK_EQ(s.code, LLMC_ERR_INVALID_ARGUMENT);
    if (!CHECK(s.message.find(word) != std::string::npos)) std::fprintf(stderr, "  %s\n", s.message.c_str());
  };
  Job j = Simple(4, 4);
  Job bad = j;
  bad.prompt.clear();
  refused(bad, "empty");
  bad = j;
  bad.prompt[2] = kVocab;
  refused(bad, "prompt_token_ids[2] is 53");
  bad.prompt[2] = -1;
  refused(bad, "is -1");
  refused(Simple(64, 4), "64 tokens but at most 63");
  auto with = [&](auto change, const char* word) {
    Job k = j;
    change(&k.params);
    refused(k, word);
  };
  with([](llmc_sampling_params* p) { p->n = 0; }, "n is 0");
  with([](llmc_sampling_params* p) { p->n = 65; }, "n is 65");
  with([](llmc_sampling_params* p) { p->max_tokens = 0; }, "max_tokens");
  with([](llmc_sampling_params* p) { p->min_tokens = 5; }, "min_tokens is 5");
  with([](llmc_sampling_params* p) { p->temperature = -1; }, "temperature");
  with([](llmc_sampling_params* p) { p->top_p = 0; }, "top_p");
  with([](llmc_sampling_params* p) { p->top_p = __builtin_nanf(""); }, "top_p");
  with([](llmc_sampling_params* p) { p->min_p = 1.5f; }, "min_p");
  with([](llmc_sampling_params* p) { p->top_k = -2; }, "top_k");
  with([](llmc_sampling_params* p) { p->repetition_penalty = 0; }, "repetition_penalty");
  with([](llmc_sampling_params* p) { p->presence_penalty = 3; }, "presence_penalty");
  with([](llmc_sampling_params* p) { p->frequency_penalty = -3; }, "frequency_penalty");
  with([](llmc_sampling_params* p) { p->num_logprobs = 21; }, "num_logprobs");
  CHECK_EQ(engine->Cancel(99).code, LLMC_ERR_NOT_FOUND);
  Job q[3] = {j, j, j};
  CHECK_OK(Submit(engine.get(), &q[0]));
  CHECK_OK(Submit(engine.get(), &q[1]));
  CHECK_EQ(Submit(engine.get(), &q[2]).code, LLMC_ERR_QUEUE_FULL);
  CHECK_OK(engine->Cancel(q[0].id));
  Outputs outputs;
  RunAll(engine.get(), &outputs);
  CHECK_EQ((outputs[{q[0].id, 0}].reason), static_cast<uint32_t>(LLMC_FINISH_CANCELLED));
  CHECK_OK(Submit(engine.get(), &q[2]));

  options.max_waiting = 0;
  options.max_num_seqs = 9;
  std::unique_ptr<Engine> none;
  CHECK_EQ(Engine::Create(std::make_unique<NullDevice>(Usual(), 65), options, &none).code, LLMC_ERR_INVALID_ARGUMENT);
}

void TestPriority() {
  EngineOptions options;
  options.max_num_seqs = 1;
  auto engine = Make(Usual(), 65, options);
  Job low = Simple(4, 3), high = Simple(4, 3);
  low.priority = 5;
  high.priority = -5;
  CHECK_OK(Submit(engine.get(), &low));
  CHECK_OK(Submit(engine.get(), &high));
  Outputs outputs;
  bool progressed = true;
  while (outputs[{high.id, 0}].terminal == 0 && progressed) {
    CHECK_OK(engine->Step(&progressed));
    Drain(engine.get(), &outputs);
  }
  CHECK(outputs[{low.id, 0}].tokens.empty());
  RunAll(engine.get(), &outputs);
}

void TestThreads() {
  auto engine = Make(Usual(), 65, {});
  std::atomic<int> left{3};
  std::vector<std::thread> threads;
  std::vector<std::vector<Job>> jobs(3, std::vector<Job>(60, Simple(9, 5)));
  for (auto& mine : jobs) {
    threads.emplace_back([&] {
      for (size_t i = 0; i < mine.size(); ++i) {
        (void)Submit(engine.get(), &mine[i]);
        if (i % 5 == 0) (void)engine->Cancel(mine[i].id);
        (void)engine->Stats();
      }
      --left;
    });
  }
  Outputs outputs;
  bool progressed = true;
  while (left > 0 || progressed) {
    CHECK_OK(engine->Step(&progressed));
    Drain(engine.get(), &outputs);
  }
  for (auto& t : threads) t.join();
  RunAll(engine.get(), &outputs);
  const Output want = Reference(jobs[0][0], 0, 64);
  CHECK_EQ(outputs.size(), 180u);
  for (const auto& [key, got] : outputs) {
    CHECK_EQ(got.terminal, 1);
    if (got.reason != LLMC_FINISH_CANCELLED) CHECK(got.tokens == want.tokens);
  }
}

}  // namespace

int main() {
  TestPrefixAndGraphs();
  TestMissPolicy();
  TestFairness();
  TestFailures();
  TestValidation();
  TestPriority();
  TestThreads();
  for (uint32_t seed = 0; seed < 400; ++seed) {
    const int before = llmc_test::Failures();
    Property(seed);
    if (llmc_test::Failures() != before) std::fprintf(stderr, "  property test, seed %u\n", seed);
  }
  // The property test must have reached what it is for.
  CHECK(total_preemptions > 0 && total_cached > 0 && total_copies > 0 && total_misses > 0 && total_mixed > 0);
  std::printf("preemptions %llu, cached %llu, copies %llu, misses %llu, mixed %llu\n",
              static_cast<unsigned long long>(total_preemptions), static_cast<unsigned long long>(total_cached),
              static_cast<unsigned long long>(total_copies), static_cast<unsigned long long>(total_misses),
              static_cast<unsigned long long>(total_mixed));
  return llmc_test::Finish("engine_test");
}
