// The engine over a null device: one behaviour a test.
#include <atomic>
#include <thread>

#include "core/clock.h"
#include "engine/wanted_bucket.h"
#include "support/engine_harness.h"

using namespace llmc_test;

namespace {

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
  for (MissPolicy policy : {MissPolicy::kLarger, MissPolicy::kSplit, MissPolicy::kError}) {
    const bool strict = policy == MissPolicy::kError;
    EngineOptions options;
    options.miss_policy = policy;
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
      CHECK(Says(outputs[{longer.id, 0}], "add bucket decode:2x16 or"));
    }
    CHECK(engine->Stats().num_bucket_misses > 0);
  }
}

// Three sequences of two blocks each in a ladder with a hole: decode graphs for two long ones, for four short ones, and a
// prefill graph that holds anything.
void TestHoleInTheLadder() {
  ModelShape m = Shape(4, 64, 4);
  AddGraph(&m, Phase::kPrefill, 64, 4, 16);
  AddGraph(&m, Phase::kDecode, 2, 2, 16);
  AddGraph(&m, Phase::kDecode, 4, 4, 1);
  m.graphs[1].seq = 64;
  for (MissPolicy policy : {MissPolicy::kLarger, MissPolicy::kSplit, MissPolicy::kError}) {
    EngineOptions options;
    options.miss_policy = policy;
    NullDevice* device;
    auto engine = Make(m, 65, options, &device);
    std::vector<Job> jobs(3, Simple(5, 6));
    for (Job& j : jobs) CHECK_OK(Submit(engine.get(), &j));
    Outputs outputs;
    RunAll(engine.get(), &outputs);
    const std::vector<llmc_bucket_miss> misses = engine->BucketMisses();
    CHECK(!misses.empty());
    uint64_t count = 0;
    for (const llmc_bucket_miss& miss : misses) {
      CHECK(miss.num_seqs == 3 && miss.num_tokens == 3 && miss.num_blocks >= 2);
      CHECK_EQ(miss.graph, policy == MissPolicy::kLarger ? 0 : BucketMiss::kNone);
      CHECK(miss.wanted_batch == 3 && miss.wanted_seq == 64);  // a length of the ladder: contexts grow
      count += miss.count;
    }
    CHECK_EQ(engine->Stats().num_missed_shapes, misses.size());
    CHECK_EQ(count, engine->Stats().num_bucket_misses);
    const std::vector<llmc_graph_stats> used = engine->GraphStats();
    CHECK_EQ(used[0].replays, policy == MissPolicy::kLarger ? 1 + count : 1u);
    CHECK_EQ(used[1].replays > 0, policy != MissPolicy::kLarger);
    const bool strict = policy == MissPolicy::kError;
    for (size_t i = 0; i < 2; ++i) Compare(outputs[{jobs[i].id, 0}], Reference(jobs[i], 0, 64));
    if (!strict) {
      Compare(outputs[{jobs[2].id, 0}], Reference(jobs[2], 0, 64));
      continue;
    }
    CHECK_EQ(count, 1u);
    CHECK_EQ((outputs[{jobs[2].id, 0}].error), LLMC_ERR_BUCKET_MISS);
    CHECK(Says(outputs[{jobs[2].id, 0}], "holds 3 sequences, the longest of up to 8 tokens"));
    CHECK(Says(outputs[{jobs[2].id, 0}], "add bucket decode:3x64 or"));
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
  CHECK(Says(outputs[{a.id, 0}], "the device was told to fail"));
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
    CHECK_EQ((outputs[{d.id, i}].error), LLMC_ERR_NOT_FINITE);
    CHECK(Says(outputs[{d.id, i}], "nan for token 0 at position 9"));
  }
}

// A device that fails a step, or a copy to swap space, and goes on: the requests of that step fail, and the others have
// their bits.
void TestFailuresOfAStep() {
  for (const llmc_status code : {LLMC_ERR_DEVICE_FAILED, LLMC_ERR_OUT_OF_MEMORY}) {
    EngineOptions options;
    options.max_num_seqs = 1;
    NullDevice* device;
    auto engine = Make(Usual(), 65, options, &device);
    device->fail_code = code;
    device->fail_after = 2;
    Job first = Simple(5, 4), second = Simple(9, 4);
    for (Job* j : {&first, &second}) CHECK_OK(Submit(engine.get(), j));
    bool progressed;
    CHECK_OK(engine->Step(&progressed));
    CHECK_EQ(engine->Step(&progressed).code, code);
    CHECK(progressed && (engine->Wait(0) & LLMC_READY_WORK) != 0);
    Outputs outputs;
    RunAll(engine.get(), &outputs);
    CHECK_EQ((outputs[{first.id, 0}].error), code);
    CHECK_EQ((outputs[{first.id, 0}].tokens.size()), 1u);
    Compare(outputs[{second.id, 0}], Reference(second, 0, 64));
    CHECK_EQ(engine->Stats().num_free_blocks, engine->Stats().num_blocks);
    // A device that is lost fails all.
    device->fail_code = LLMC_ERR_DEVICE_LOST;
    device->fail_after = 1;
    for (Job* j : {&first, &second}) CHECK_OK(Submit(engine.get(), j));
    CHECK_EQ(engine->Step(&progressed).code, LLMC_ERR_DEVICE_LOST);
    Drain(engine.get(), &outputs);
    for (Job* j : {&first, &second}) CHECK_EQ((outputs[{j->id, 0}].error), LLMC_ERR_DEVICE_LOST);
  }
}

// A step in flight fails where a call needs an idle device: the call goes on, and the next step returns the error.
void TestFailuresOfALandedStep() {
  NullDevice::late = true;
  NullDevice* device;
  auto engine = Make(Usual(), 65, EngineOptions(), &device);
  device->fail_code = LLMC_ERR_DEVICE_FAILED;
  Job job = Simple(5, 6), after = Simple(9, 4);
  CHECK_OK(Submit(engine.get(), &job));
  bool progressed;
  CHECK_OK(engine->Step(&progressed));
  device->fail_after = 1;
  CHECK_OK(engine->EnableGraph(0, true));
  CHECK((engine->Wait(0) & LLMC_READY_WORK) != 0);
  CHECK_EQ(engine->Step(&progressed).code, LLMC_ERR_DEVICE_FAILED);
  CHECK_OK(Submit(engine.get(), &after));
  Outputs outputs;
  RunAll(engine.get(), &outputs);
  CHECK_EQ((outputs[{job.id, 0}].error), LLMC_ERR_DEVICE_FAILED);
  Compare(outputs[{after.id, 0}], Reference(after, 0, 64));
  NullDevice::late = false;
}

// What a request computed before its logits were not numbers is not given to others; what it found stays.
void TestFailedPrefix() {
  NullDevice* device;
  auto engine = Make(Usual(), 65, {}, &device);
  Outputs outputs;
  auto run = [&](uint32_t length, uint32_t n) {
    Job job = Simple(length, 4);
    job.params.n = n;
    CHECK_OK(Submit(engine.get(), &job));
    RunAll(engine.get(), &outputs);
    if (!device->poison) Compare(outputs[{job.id, 0}], Reference(job, 0, 64));
    return outputs[{job.id, 0}];
  };
  run(9, 1);  // two blocks of four tokens
  device->poison = true;
  CHECK_EQ(run(18, 2).error, LLMC_ERR_NOT_FINITE);
  device->poison = false;
  CHECK_EQ(run(18, 2).num_cached, 8u);
  CHECK_EQ(run(18, 1).num_cached, 16u);
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

// A later, more urgent request takes the memory of an earlier one, not the other way round.
void TestPriorityUnderPreemption() {
  auto engine = Make(Usual(), 13, {});
  Job low = Simple(8, 24), high = Simple(8, 24);
  low.priority = 1;
  high.prompt[0] = 1;
  CHECK_OK(Submit(engine.get(), &low));
  Outputs outputs;
  bool progressed = true;
  for (int i = 0; i < 3; ++i) CHECK_OK(engine->Step(&progressed));
  CHECK_OK(Submit(engine.get(), &high));
  while (outputs[{high.id, 0}].terminal == 0 && progressed) {
    CHECK_OK(engine->Step(&progressed));
    CHECK_OK(engine->CheckIntegrity());
    Drain(engine.get(), &outputs);
  }
  CHECK_EQ((outputs[{low.id, 0}].terminal), 0);
  CHECK(engine->Stats().num_preemptions > 0);
  RunAll(engine.get(), &outputs);
  Compare(outputs[{low.id, 0}], Reference(low, 0, 48));
  Compare(outputs[{high.id, 0}], Reference(high, 0, 48));
}

void TestQueueFullFromThreads() {
  EngineOptions options;
  options.max_waiting = 5;
  auto engine = Make(Usual(), 65, options);
  std::atomic<int> taken{0}, full{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 10; ++i) {
        Job j = Simple(4, 2);
        const Status s = Submit(engine.get(), &j);
        ++(s.ok() ? taken : full);
        if (!s.ok()) CHECK_EQ(s.code, LLMC_ERR_QUEUE_FULL);
      }
    });
  }
  for (auto& t : threads) t.join();
  CHECK_EQ(taken, 5);
  CHECK_EQ(full, 35);
  // Cancelling waiting requests frees their places with the next step.
  for (uint64_t id = 1; id <= 5; ++id) CHECK_OK(engine->Cancel(id));
  bool progressed;
  CHECK_OK(engine->Step(&progressed));
  CHECK(progressed);
  CHECK_EQ(engine->Stats().num_waiting, 0u);
  for (int i = 0; i < 5; ++i) {
    Job j = Simple(4, 2);
    CHECK_OK(Submit(engine.get(), &j));
  }
  Outputs outputs;
  RunAll(engine.get(), &outputs);
}

// ---- prompt logprobs -------------------------------------------------------------------------------------------

// The same values from ladders that cut the prompt into chunks of 1, 3, 4 and all tokens.
void TestPromptLogprobs() {
  Job job = Simple(40, 3);
  job.num_prompt_logprobs = 5;
  job.params.n = 2;
  const Output want[2] = {Reference(job, 0, 64), Reference(job, 1, 64)};
  CHECK_EQ(want[0].prompt.size(), 39u);
  for (uint32_t samples : {1u, 3u, 4u, 64u}) {
    for (Phase phase : {Phase::kPrefill, Phase::kDecode, Phase::kMixed}) {
      ModelShape m = Shape(4, 64, 8);
      m.graphs.push_back({Phase::kPrefill, 1, 16, 16, 1, 1, 16});
      m.graphs.push_back({phase, samples, 64, std::max(samples, 8u), std::max(samples, 8u), samples, 16});
      AddGraph(&m, Phase::kDecode, 2, 2, 16);
      NullDevice* device;
      auto engine = Make(m, 65, {}, &device);
      Job plain = Simple(40, 2);
      Outputs outputs;
      CHECK_OK(Submit(engine.get(), &plain));  // its blocks are cached, but a prompt that is scored must not use them
      RunAll(engine.get(), &outputs);
      CHECK_OK(Submit(engine.get(), &job));
      const uint64_t before = engine->Stats().scheduled_tokens;
      RunAll(engine.get(), &outputs);
      for (uint32_t i = 0; i < 2; ++i) Compare(outputs[{job.id, i}], want[i]);
      CHECK_EQ((outputs[{job.id, 0}].num_cached), 0u);
      CHECK_EQ(engine->Stats().scheduled_tokens - before, 40u + 2 * 2);
      if (phase == Phase::kDecode && samples > 2) CHECK(device->decode_chunks > 0);
    }
  }
  auto engine = Make(Usual(), 65, {});
  Job bad = Simple(4, 4);
  bad.num_prompt_logprobs = 21;
  CHECK_EQ(Submit(engine.get(), &bad).code, LLMC_ERR_INVALID_ARGUMENT);
}

// ---- ends, waiting, warm-up ------------------------------------------------------------------------------------

void TestDeadlines() {
  NullDevice* device;
  EngineOptions options;
  options.max_num_seqs = 1;
  auto engine = Make(Usual(), 65, options, &device);
  Job passed = Simple(9, 4), running = Simple(9, 4), parked = Simple(9, 4), waiting = Simple(9, 4),
      later = Simple(9, 4);
  passed.deadline_ns = 1;
  CHECK_OK(Submit(engine.get(), &passed));
  Outputs outputs;
  Needs needs;
  RunAll(engine.get(), &outputs);
  CHECK_EQ((outputs[{passed.id, 0}].reason), static_cast<uint32_t>(LLMC_FINISH_TIMEOUT));
  CHECK_EQ((outputs[{passed.id, 0}].end.first_scheduled_ns), 0u);
  CHECK_EQ(device->runs, 0u);
  // Two that wait for masks and one in the queue; waiting for the deadline is what lets the engine end them.
  running.guided = parked.guided = waiting.guided = true;
  running.deadline_ns = parked.deadline_ns = waiting.deadline_ns = MonotonicNs() + 20'000'000;
  later.deadline_ns = UINT64_MAX;
  for (Job* j : {&running, &parked, &waiting, &later}) CHECK_OK(Submit(engine.get(), j));
  const auto ended = [&](const Job& j) { return outputs[{j.id, 0}].terminal == 1; };
  while (!ended(running) || !ended(parked) || !ended(waiting) || !ended(later)) {
    const uint32_t ready = engine->Wait(UINT64_MAX);
    bool progressed;
    if (ready & LLMC_READY_WORK) CHECK_OK(engine->Step(&progressed));
    CHECK_OK(engine->CheckIntegrity());
    Drain(engine.get(), &outputs, &needs);
  }
  for (const Job* j : {&running, &parked, &waiting}) {
    CHECK_EQ((outputs[{j->id, 0}].reason), static_cast<uint32_t>(LLMC_FINISH_TIMEOUT));
    CHECK((outputs[{j->id, 0}].end.time_ns) >= j->deadline_ns);
  }
  Compare(outputs[{later.id, 0}], Reference(later, 0, 64));
}

void TestWait() {
  auto engine = Make(Usual(), 65, {});
  CHECK_EQ(engine->Wait(0), 0u);
  CHECK_EQ(engine->Wait(100'000), 0u);
  Job job = Simple(9, 1000);
  std::thread host([&] { CHECK_OK(Submit(engine.get(), &job)); });
  CHECK_EQ(engine->Wait(UINT64_MAX), static_cast<uint32_t>(LLMC_READY_WORK));
  host.join();
  bool progressed;
  for (int i = 0; i < 3; ++i) CHECK_OK(engine->Step(&progressed));
  CHECK_EQ(engine->Wait(UINT64_MAX), static_cast<uint32_t>(LLMC_READY_WORK | LLMC_READY_EVENTS));
  CHECK_OK(engine->Cancel(job.id));
  CHECK_OK(engine->Step(&progressed));
  CHECK_EQ(engine->Wait(UINT64_MAX), static_cast<uint32_t>(LLMC_READY_EVENTS));
  Outputs outputs;
  Drain(engine.get(), &outputs);
  // The cancel ended it in the very next step: no token beyond those of the steps before.
  CHECK_EQ((outputs[{job.id, 0}].reason), static_cast<uint32_t>(LLMC_FINISH_CANCELLED));
  CHECK((outputs[{job.id, 0}].tokens.size()) <= 3);
  CHECK_EQ(engine->Wait(0), 0u);
}

void TestWarm() {
  NullDevice* device;
  ModelShape m = Usual();
  AddGraph(&m, Phase::kMixed, 24, 9, 2);
  auto engine = Make(m, 65, {}, &device);
  for (uint32_t g = 0; g < engine->num_graphs(); ++g) {
    const uint64_t runs = device->runs;
    uint64_t ns = 0;
    CHECK_OK(engine->WarmGraph(g, {}, &ns));
    CHECK_OK(engine->WarmGraph(g, {}, nullptr));
    CHECK_EQ(device->last_graph, g);
    CHECK_EQ(device->runs, runs + 2);
    CHECK(ns > 0);
  }
  CHECK(device->dummy_seqs > 0);
  CHECK_EQ(engine->WarmGraph(engine->num_graphs(), {}, nullptr).code, LLMC_ERR_OUT_OF_RANGE);
  CHECK_EQ(engine->Stats().num_steps, 0u);
  Job job = Simple(33, 5);
  CHECK_OK(Submit(engine.get(), &job));
  Outputs outputs;
  RunAll(engine.get(), &outputs);
  Compare(outputs[{job.id, 0}], Reference(job, 0, 64));
}

void TestMissesByShape() {
  ModelShape m = Shape(4, 64, 4);
  AddGraph(&m, Phase::kPrefill, 16, 4, 16);
  AddGraph(&m, Phase::kDecode, 4, 4, 3);  // contexts up to 12
  auto engine = Make(m, 65, {});
  Job job = Simple(10, 8);
  CHECK_OK(Submit(engine.get(), &job));
  Outputs outputs;
  RunAll(engine.get(), &outputs);
  const std::vector<llmc_bucket_miss> misses = engine->BucketMisses();
  CHECK_EQ(misses.size(), 2u);  // contexts of 13 … 16 and of 17 tokens
  for (const llmc_bucket_miss& miss : misses) {
    CHECK_EQ(miss.phase, static_cast<uint32_t>(Phase::kDecode));
    CHECK(miss.num_seqs == 1 && miss.num_tokens == 1);
  }
  CHECK(misses[0].num_blocks == 4 && misses[0].count == 4 && misses[1].num_blocks == 5 && misses[1].count == 1);
  CHECK(misses[0].wanted_batch == 1 && misses[0].wanted_seq == 16 && misses[1].wanted_seq == 20);
}

void TestWantedBucket() {
  ModelShape m = Shape(16, 130, 4);
  m.graphs.push_back({Phase::kPrefill, 4, 64, 256, 4, 4, 9});
  m.graphs.push_back({Phase::kDecode, 2, 128, 2, 2, 2, 8});
  m.graphs.push_back({Phase::kDecode, 2, 64, 2, 2, 2, 4});
  m.graphs.push_back({Phase::kMixed, 4, 96, 96, 4, 4, 9});
  const auto wanted = [&](Phase phase, uint32_t seqs, uint32_t tokens, uint32_t blocks) {
    return llmc::WantedFor({phase, seqs, tokens, blocks, BucketMiss::kNone, 1}, m).Name();
  };
  CHECK(wanted(Phase::kDecode, 3, 3, 2) == "decode:3x64");  // the least of those that hold it
  CHECK(wanted(Phase::kDecode, 3, 3, 5) == "decode:3x128");
  CHECK(wanted(Phase::kDecode, 3, 3, 9) == "decode:3x144");  // none does
  CHECK(wanted(Phase::kDecode, 3, 3, 99) == "decode:3x144");  // no context is longer
  CHECK(wanted(Phase::kPrefill, 2, 70, 3) == "prefill:2x64");
  CHECK(wanted(Phase::kPrefill, 1, 70, 5) == "prefill:1x70");
}

// Requests of one step were scheduled at one time, before its replay.
void TestScheduledTime() {
  NullDevice* device;
  auto engine = Make(Usual(), 65, {}, &device);
  uint64_t replayed_ns = 0;
  device->on_run = [&] { replayed_ns = MonotonicNs(); };
  Job first = Simple(5, 1), second = Simple(7, 1);
  for (Job* j : {&first, &second}) CHECK_OK(Submit(engine.get(), j));
  Outputs outputs;
  RunAll(engine.get(), &outputs);
  CHECK_EQ(device->runs, 1u);
  const llmc_event &a = outputs[{first.id, 0}].end, &b = outputs[{second.id, 0}].end;
  CHECK_EQ(a.first_scheduled_ns, b.first_scheduled_ns);
  CHECK(b.arrival_ns <= a.first_scheduled_ns && a.first_scheduled_ns <= replayed_ns);
}

// A device that works while the engine goes on: what comes meanwhile waits for the next step, and who leaves meanwhile
// gets no token of this one.
void TestOverlap() {
  NullDevice::late = true;
  NullDevice* device;
  auto engine = Make(Usual(), 65, {}, &device);
  Job first = Simple(5, 6), second = Simple(7, 3), gone = Simple(6, 9);
  for (Job* j : {&first, &gone}) CHECK_OK(Submit(engine.get(), j));
  device->on_run = [&] {
    if (device->runs == 3) {
      CHECK_OK(Submit(engine.get(), &second));
      CHECK_OK(engine->Cancel(gone.id));
    }
  };
  Outputs outputs;
  RunAll(engine.get(), &outputs);
  Compare(outputs[{first.id, 0}], Reference(first, 0, 64));
  Compare(outputs[{second.id, 0}], Reference(second, 0, 64));
  const Output& left = outputs[{gone.id, 0}];
  CHECK_EQ(left.reason, static_cast<uint32_t>(LLMC_FINISH_CANCELLED));
  CHECK(left.tokens.size() < 9);
  // It fails at its fence: all requests end, and the engine goes on as new.
  device->on_run = nullptr;
  device->fail_after = 2;
  Job failed = Simple(5, 4), after = Simple(9, 2);
  CHECK_OK(Submit(engine.get(), &failed));
  bool more = true;
  Status status;
  for (int i = 0; i < 10 && status.ok(); ++i) status = engine->Step(&more);
  CHECK_EQ(status.code, static_cast<int32_t>(LLMC_ERR_INTERNAL));
  Drain(engine.get(), &outputs);
  CHECK(outputs[std::pair(failed.id, 0u)].kind == LLMC_EVENT_FAILED);
  CHECK_OK(Submit(engine.get(), &after));
  RunAll(engine.get(), &outputs);
  Compare(outputs[{after.id, 0}], Reference(after, 0, 64));
  NullDevice::late = false;
}

// A device that draws tokens itself is asked for all of them, and the host for none: the same outputs, whether it works
// while the engine goes on or not.
void TestDeviceDraws() {
  NullDevice::draws = true;
  for (const bool late : {false, true}) {
    NullDevice::late = late;
    NullDevice* device;
    auto engine = Make(Usual(), 65, {}, &device);
    Job several = Simple(9, 6), scored = Simple(7, 4), warm = Simple(5, 8);
    several.params.n = 3;
    several.params.temperature = scored.params.temperature = warm.params.temperature = 0.8f;
    scored.num_prompt_logprobs = 2;
    warm.params.num_logprobs = 4;
    warm.params.top_k = 9;
    for (Job* j : {&several, &scored, &warm}) CHECK_OK(Submit(engine.get(), j));
    Outputs outputs;
    RunAll(engine.get(), &outputs);
    for (uint32_t k = 0; k < 3; ++k) Compare(outputs[{several.id, k}], Reference(several, k, 64));
    Compare(outputs[{scored.id, 0}], Reference(scored, 0, 64));
    Compare(outputs[{warm.id, 0}], Reference(warm, 0, 64));
    CHECK(device->runs > 0);
    CHECK_EQ(device->draw_calls, device->runs);
    // It fails while it draws: all requests end.
    device->fail_after = 2;
    Job failed = Simple(5, 4);
    CHECK_OK(Submit(engine.get(), &failed));
    bool more = true;
    Status status;
    for (int i = 0; i < 10 && status.ok(); ++i) status = engine->Step(&more);
    CHECK_EQ(status.code, static_cast<int32_t>(LLMC_ERR_INTERNAL));
    Drain(engine.get(), &outputs);
    CHECK(outputs[std::pair(failed.id, 0u)].kind == LLMC_EVENT_FAILED);
  }
  NullDevice::draws = NullDevice::late = false;
}

// The graph, sequences and tokens of each step, until nothing is left to do.
struct Ran {
  Phase phase;
  uint32_t seqs, tokens;
  bool operator==(const Ran& o) const { return phase == o.phase && seqs == o.seqs && tokens == o.tokens; }
};

std::vector<Ran> RunSteps(Engine* engine, NullDevice* device, Outputs* outputs) {
  std::vector<Ran> steps;
  for (bool more = true; more;) {
    const uint64_t runs = device->runs;
    CHECK_OK(engine->Step(&more));
    CHECK_OK(engine->CheckIntegrity());
    Drain(engine, outputs);
    if (device->runs == runs) continue;
    steps.push_back({device->model().graphs[device->last_graph].phase, device->last_seqs, device->last_tokens});
  }
  return steps;
}

// Decodes ride along with the chunks of a prompt; without a mixed graph, or with one too small, both alternate.
void TestMixed() {
  const auto run = [](uint32_t mixed_tokens, uint32_t mixed_seqs, uint32_t budget, llmc_engine_stats* stats) {
    ModelShape m = Usual();
    if (mixed_tokens) AddGraph(&m, Phase::kMixed, mixed_tokens, mixed_seqs, 16);
    EngineOptions options;
    options.max_tokens_per_step = budget;
    NullDevice* device;
    auto engine = Make(m, 65, options, &device);
    Outputs outputs;
    Job first = Simple(4, 6), second = Simple(5, 6), late = Simple(30, 2);
    for (auto& t : second.prompt) t = (t + 1) % kVocab;
    for (auto& t : late.prompt) t = (t + 2) % kVocab;
    CHECK_OK(Submit(engine.get(), &first));
    CHECK_OK(Submit(engine.get(), &second));
    bool more;
    CHECK_OK(engine->Step(&more));  // both prompts
    CHECK_OK(Submit(engine.get(), &late));
    const std::vector<Ran> steps = RunSteps(engine.get(), device, &outputs);
    for (const Job* j : {&first, &second, &late}) Compare(outputs[{j->id, 0}], Reference(*j, 0, 64));
    *stats = engine->Stats();
    CHECK_EQ(stats->num_steps, stats->num_prefill_steps + stats->num_decode_steps);
    CHECK_EQ(stats->num_bucket_misses, 0u);
    return steps;
  };
  const Ran p16{Phase::kPrefill, 1, 16}, p14{Phase::kPrefill, 1, 14};
  const auto d = [](uint32_t seqs) { return Ran{Phase::kDecode, seqs, seqs}; };
  const auto m = [](uint32_t tokens) { return Ran{Phase::kMixed, 3, tokens}; };
  llmc_engine_stats stats;
  const std::vector<Ran> alternating{d(2), p16, d(2), p14, d(3), d(2), d(2)};
  CHECK(run(0, 0, 0, &stats) == alternating);
  CHECK_EQ(stats.num_mixed_steps, 0u);
  CHECK(run(12, 8, 0, &stats) == (std::vector<Ran>{m(12), m(12), m(12), d(3), d(2)}));
  CHECK_EQ(stats.num_mixed_steps, 3u);
  CHECK_EQ(stats.padded_tokens, 12u - 9 + 1);  // of the first step, and of three sequences in a decode graph of four
  CHECK(run(24, 8, 17, &stats) == (std::vector<Ran>{m(17), m(17), d(3), d(2), d(2)}));  // decodes count
  CHECK(run(12, 2, 0, &stats) == alternating);  // a graph of two sequences
  CHECK_EQ(stats.num_mixed_steps, 0u);
}

// Prefill goes on when the decodes of a step leave it no room.
void TestMixedIsNotStarved() {
  ModelShape m = Usual();
  AddGraph(&m, Phase::kMixed, 6, 6, 2);  // reaches 8 tokens of context
  auto engine = Make(m, 65, {});
  Outputs outputs;
  Job decoding = Simple(3, 40), scored = Simple(20, 2), longer = Simple(40, 2);
  scored.num_prompt_logprobs = 0;
  for (Job* j : {&decoding, &scored, &longer}) CHECK_OK(Submit(engine.get(), j));
  for (int i = 0; i < 30; ++i) {
    bool more;
    CHECK_OK(engine->Step(&more));
    CHECK_OK(engine->CheckIntegrity());
    Drain(engine.get(), &outputs);
  }
  CHECK_EQ((outputs[{decoding.id, 0}].terminal), 0);
  for (const Job* j : {&scored, &longer}) Compare(outputs[{j->id, 0}], Reference(*j, 0, 64));
}

// Samples are the scarce thing: a chunk that the budget cuts is not cut again for the sample it does not take.
void TestChunkWithoutSample() {
  ModelShape m = Shape(4, 64, 8);
  m.graphs.push_back({Phase::kPrefill, 2, 16, 16, 2, 1, 16});  // two sequences, one sample
  AddGraph(&m, Phase::kDecode, 8, 8, 16);
  EngineOptions options;
  options.max_tokens_per_step = 10;
  NullDevice* device;
  auto engine = Make(m, 65, options, &device);
  Outputs outputs;
  Job first = Simple(4, 1), second = Simple(30, 1);
  second.prompt[0] = 1;
  for (Job* j : {&first, &second}) CHECK_OK(Submit(engine.get(), j));
  const std::vector<Ran> steps = RunSteps(engine.get(), device, &outputs);
  CHECK(steps.front() == (Ran{Phase::kPrefill, 2, 10}));
  for (const Job* j : {&first, &second}) Compare(outputs[{j->id, 0}], Reference(*j, 0, 64));
}

}  // namespace

int main() {
  TestPrefixAndGraphs();
  TestMissPolicy();
  TestHoleInTheLadder();
  TestFairness();
  TestFailures();
  TestFailuresOfAStep();
  TestFailuresOfALandedStep();
  TestFailedPrefix();
  TestValidation();
  TestPriority();
  TestPriorityUnderPreemption();
  TestQueueFullFromThreads();
  TestPromptLogprobs();
  TestDeadlines();
  TestWait();
  TestWarm();
  TestMissesByShape();
  TestWantedBucket();
  TestScheduledTime();
  TestOverlap();
  TestDeviceDraws();
  TestMixed();
  TestMixedIsNotStarved();
  TestChunkWithoutSample();
  return Finish("engine_test");
}
