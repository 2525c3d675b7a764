// Beams share blocks and compute nothing twice, best_of tells the likeliest, and what does not fit is refused.
#include "support/ranked_reference.h"

using namespace llmc_test;

namespace {

Job Beams(uint32_t length, uint32_t max_tokens, uint32_t width) {
  Job j = Simple(length, max_tokens);
  j.params.beam_width = j.params.n = width;
  return j;
}

void CompareAll(Outputs* outputs, const Job& job, uint32_t max_len) {
  const std::vector<Output> want = ReferenceOutputs(job, max_len);
  for (uint32_t i = 0; i < job.params.n; ++i) Compare((*outputs)[{job.id, i}], want[i]);
}

// A long prompt is there once, whatever beams leave and join; each token of a beam is computed once.
void TestBeamsShareBlocks() {
  NullDevice* device;
  auto engine = Make(Usual(), 65, {}, &device);
  Job job = Beams(40, 12, 4);
  CHECK_OK(Submit(engine.get(), &job));
  Outputs outputs;
  bool progressed = true;
  uint32_t most = 0;
  while (progressed) {
    CHECK_OK(engine->Step(&progressed));
    CHECK_OK(engine->CheckIntegrity());
    const llmc_engine_stats stats = engine->Stats();
    most = std::max(most, stats.num_blocks - stats.num_free_blocks);
    CHECK(stats.num_running <= 4);
    Drain(engine.get(), &outputs);
  }
  CompareAll(&outputs, job, 64);
  CHECK(most >= 10 + 4 && most <= 10 + 4 * 4);  // 40 tokens, and up to 12 and a copy of each beam
  CHECK(device->copies > 0);
  const llmc_engine_stats stats = engine->Stats();
  CHECK_EQ(stats.num_preemptions, 0u);
  CHECK_EQ(stats.scheduled_tokens, 40u + 4 * 11);
  CHECK_EQ(stats.num_free_blocks, stats.num_blocks);
}

// More beams than seats, and hardly a block: they take turns, and none waits for blocks of one that waits for it.
void TestBeamsTakeTurns() {
  for (const uint32_t seats : {1u, 2u, 8u}) {
    for (const uint32_t blocks : {8u, 12u, 30u}) {
      EngineOptions options;
      options.max_num_seqs = seats;
      options.prefix_cache = blocks != 12;
      auto engine = Make(Usual(), blocks, options);
      Job job = Beams(6, 15, 9), other = Beams(5, 9, 3), plain = Simple(9, 8);
      job.params.n = 2;
      other.prompt[0] = 1;
      plain.priority = -1;
      Outputs outputs;
      for (Job* j : {&job, &other}) CHECK_OK(Submit(engine.get(), j));
      bool progressed;
      for (int i = 0; i < 4; ++i) CHECK_OK(engine->Step(&progressed));
      CHECK_OK(Submit(engine.get(), &plain));
      RunAll(engine.get(), &outputs);
      const uint32_t reach = std::min(64u, (blocks - 1) * 4);
      for (Job* j : {&job, &other, &plain}) CompareAll(&outputs, *j, reach);
    }
  }
}

// Nothing is told before the end, however it comes.
void TestBeamsEndUntold() {
  NullDevice* device;
  auto engine = Make(Usual(), 65, {}, &device);
  Job cancelled = Beams(6, 30, 4), late = Beams(6, 30, 3), poisoned = Beams(6, 30, 2);
  late.deadline_ns = 1;
  Outputs outputs;
  bool progressed;
  CHECK_OK(Submit(engine.get(), &cancelled));
  for (int i = 0; i < 5; ++i) CHECK_OK(engine->Step(&progressed));
  Drain(engine.get(), &outputs);
  CHECK(outputs.empty());
  CHECK_OK(engine->Cancel(cancelled.id));
  CHECK_OK(Submit(engine.get(), &late));
  RunAll(engine.get(), &outputs);
  for (uint32_t i = 0; i < 4; ++i) {
    CHECK_EQ((outputs[{cancelled.id, i}].reason), static_cast<uint32_t>(LLMC_FINISH_CANCELLED));
  }
  for (uint32_t i = 0; i < 3; ++i) CHECK_EQ((outputs[{late.id, i}].reason), static_cast<uint32_t>(LLMC_FINISH_TIMEOUT));
  CHECK_OK(Submit(engine.get(), &poisoned));
  for (int i = 0; i < 3; ++i) CHECK_OK(engine->Step(&progressed));
  device->poison = true;
  RunAll(engine.get(), &outputs);
  for (uint32_t i = 0; i < 2; ++i) CHECK_EQ((outputs[{poisoned.id, i}].error), LLMC_ERR_NOT_FINITE);
  CHECK_EQ(engine->Stats().num_free_blocks, engine->Stats().num_blocks);
}

void TestAlternatives() {
  auto engine = Make(Usual(), 65, {});
  Job job = Beams(6, 5, 1);
  job.params.num_logprobs = 7;
  CHECK_OK(Submit(engine.get(), &job));
  bool progressed = true;
  llmc_event events[16];
  events[0].struct_size = sizeof(llmc_event);
  uint64_t count = 0;
  while (progressed) {
    CHECK_OK(engine->Step(&progressed));
    count += engine->Poll(events + count, 16 - count);
  }
  CHECK_EQ(count, 6u);
  std::vector<int32_t> tokens = job.prompt;
  Sampler sampler(kVocab, {kEos});
  for (uint32_t i = 0; i < 5; ++i) {
    SampleResult want;
    CHECK_OK(sampler.Score(LogitsAfter(tokens).data(), events[i].token_id, 7, 0, &want));
    CHECK(events[i].num_top == 7 && events[i].rank == want.rank && events[i].logprob == want.logprob);
    CHECK(std::equal(want.top_token_ids, want.top_token_ids + 7, events[i].top_token_ids));
    CHECK(std::equal(want.top_logprobs, want.top_logprobs + 7, events[i].top_logprobs));
    tokens.push_back(events[i].token_id);
  }
}

void TestRefusals() {
  auto engine = Make(Usual(), 65, {});
  const auto refused = [&engine](void (*change)(Job*), const char* what) {
    Job job = Beams(4, 4, 3);
    change(&job);
    const Status status = Submit(engine.get(), &job);
    CHECK_EQ(status.code, LLMC_ERR_INVALID_ARGUMENT);
    CHECK(status.message.find(what) != std::string::npos);
  };
  refused([](Job* j) { j->params.beam_width = 2; }, "beam_width is 2 but n is 3");
  refused([](Job* j) { j->params.beam_width = 65; }, "beam_width is 65");
  refused([](Job* j) { j->params.beam_width = 54; }, "the vocabulary has 53 tokens");
  refused([](Job* j) { j->params.best_of = 4; }, "best_of is 4 beside beam search");
  refused([](Job* j) { j->params.length_penalty = INFINITY; }, "length_penalty is inf");
  refused([](Job* j) { j->params.early_stopping = 3; }, "early_stopping is 3");
  refused([](Job* j) { j->params.presence_penalty = 1; }, "leave out penalties");
  refused([](Job* j) { j->guided = true; }, "leave out beam_width");
  refused([](Job* j) { j->params.beam_width = 0, j->params.best_of = 2; }, "best_of is 2 but n is 3");
  refused([](Job* j) { j->params.beam_width = 0, j->params.best_of = 65; }, "best_of is 65");
  refused([](Job* j) { j->params.beam_width = 0, j->params.best_of = 4, j->guided = true; }, "leave out best_of");
}

}  // namespace

int main() {
  TestBeamsShareBlocks();
  TestBeamsTakeTurns();
  TestBeamsEndUntold();
  TestAlternatives();
  TestRefusals();
  return Finish("ranked_test");
}
