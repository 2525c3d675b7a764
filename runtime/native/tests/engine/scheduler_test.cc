// What becomes of prefills and decodes that no graph of their phase holds, running or about to be admitted.
#include "engine/scheduler.h"

#include <memory>
#include <numeric>

#include "support/check.h"

using namespace llmc;
using namespace llmc_test;

namespace {

constexpr uint32_t kBlock = 4;

// Prefill graphs reach 8 tokens, decode graphs `decode_blocks` blocks.
ModelShape Model(uint32_t decode_blocks) {
  ModelShape m{};
  m.block_size = kBlock;
  m.max_model_len = 64;
  m.max_num_seqs = 4;
  m.graphs = {{Phase::kPrefill, 1, 8, 8, 4, 4, 2}, {Phase::kDecode, 2, 32, 2, 2, 2, decode_blocks}};
  return m;
}

struct Setting {
  Setting(uint32_t decode_blocks, MissPolicy policy)
      : model(Model(decode_blocks)), blocks(65, kBlock, true), scheduler(model, {4, 0, policy}, &blocks) {}

  Sequence* Add(uint32_t length, int32_t first_token) {
    all.push_back(std::make_unique<Sequence>());
    Sequence* s = all.back().get();
    s->arrival = all.size();
    s->num_prompt = length;
    s->tokens.resize(length);
    std::iota(s->tokens.begin(), s->tokens.end(), first_token);
    scheduler.Add(s);
    return s;
  }

  const StepPlan& Step() {
    scheduler.Schedule(&plan);
    CHECK_OK(scheduler.CheckIntegrity());
    if (!plan.misses.empty()) return plan;
    scheduler.Commit(plan);
    for (const StepItem& item : plan.items) {
      if (item.sample) item.sequence->tokens.push_back(7);
    }
    return plan;
  }

  ModelShape model;
  BlockManager blocks;
  Scheduler scheduler;
  std::vector<std::unique_ptr<Sequence>> all;
  StepPlan plan;
};

bool Misses(const StepPlan& plan, Phase phase, uint32_t seqs, uint32_t tokens, uint32_t blocks, int32_t graph) {
  const BucketMiss& m = plan.miss;
  return m.count == 1 && m.phase == phase && m.seqs == seqs && m.tokens == tokens && m.blocks == blocks &&
         m.graph == graph;
}

// The chunk behind the reach of all prefill graphs takes a decode graph, by itself and a token at a time.
void TestPrefillInALargerGraph() {
  Setting now(8, MissPolicy::kLarger);
  Sequence* const s = now.Add(11, 100);
  CHECK_EQ(now.Step().load.tokens, 8u);
  CHECK_EQ(now.plan.graph, 0u);
  Sequence* const behind = now.Add(3, 200);
  for (uint32_t computed = 8; computed < 10; ++computed) {
    const StepPlan& plan = now.Step();
    CHECK(plan.items.size() == 1 && plan.items[0].sequence == s && plan.items[0].start == computed);
    CHECK_EQ(plan.load.tokens, 1u);
    CHECK_EQ(plan.graph, 1u);
    CHECK(plan.prefill && plan.misses.empty());
    CHECK(Misses(plan, Phase::kPrefill, 1, 11 - computed, 3, computed == 10 ? 1 : BucketMiss::kNone));
    CHECK(behind->state == Sequence::State::kWaiting);
  }
  // Its last token is a decode. Whoever waited has a turn first.
  CHECK(now.Step().items[0].sequence == s && !now.plan.prefill && now.plan.items[0].sample);
  CHECK_EQ(now.plan.miss.count, 0u);
  CHECK_EQ(now.scheduler.num_bucket_misses(), 2u);
}

// One that begins behind the reach, for its prefix is cached.
void TestAdmittedInALargerGraph() {
  Setting now(8, MissPolicy::kLarger);
  Sequence* const first = now.Add(12, 100);
  while (first->num_computed < 12) now.Step();
  now.scheduler.Remove(first);
  const uint64_t misses = now.scheduler.num_bucket_misses();
  Sequence* const s = now.Add(14, 100);  // the same tokens, and two behind them
  const StepPlan& plan = now.Step();
  CHECK(plan.items.size() == 1 && plan.items[0].sequence == s && plan.items[0].start == 12 && plan.graph == 1);
  CHECK(Misses(plan, Phase::kPrefill, 1, 2, 4, BucketMiss::kNone));
  CHECK_EQ(now.scheduler.num_bucket_misses(), misses + 1);
}

void TestPrefillFails() {
  // Where misses are errors, running or admitted.
  Setting strict(8, MissPolicy::kError);
  Sequence* const running = strict.Add(11, 100);
  CHECK_EQ(strict.Step().load.tokens, 8u);
  CHECK(strict.Step().misses == std::vector<Sequence*>{running} && strict.plan.items.empty());
  CHECK(Misses(strict.plan, Phase::kPrefill, 1, 3, 3, BucketMiss::kNone));
  CHECK(running->state == Sequence::State::kRunning);  // until the engine fails it
  strict.scheduler.Remove(running);
  strict.scheduler.Enable(0, false);
  Sequence* const admitted = strict.Add(5, 200);
  Sequence* const next = strict.Add(6, 300);
  CHECK(strict.Step().misses == (std::vector<Sequence*>{admitted, next}) && strict.plan.items.empty());
  CHECK(admitted->state == Sequence::State::kDone && next->state == Sequence::State::kDone);
  CHECK_EQ(strict.scheduler.num_waiting() + strict.scheduler.num_running(), 0u);

  // Where no graph of any phase holds it, and while it is being scored.
  for (const bool scored : {false, true}) {
    Setting now(2, MissPolicy::kLarger);
    Sequence* const s = now.Add(11, 100);
    if (scored) s->score_end = 10;
    while (now.plan.misses.empty() && now.Step().load.tokens > 0) {
    }
    CHECK(now.plan.misses == std::vector<Sequence*>{s});
    CHECK_EQ(s->num_computed, 8u);
  }
  // A scored prompt that cannot be admitted keeps the step to itself.
  Setting none(2, MissPolicy::kLarger);
  none.scheduler.Enable(0, false);
  none.scheduler.Enable(1, false);
  Sequence* const s = none.Add(5, 100);
  s->score_end = 4;
  Sequence* const behind = none.Add(5, 200);
  CHECK(none.Step().misses == std::vector<Sequence*>{s});
  CHECK(s->state == Sequence::State::kDone && behind->state == Sequence::State::kWaiting);
}

// Three decodes, graphs for two: those that fit run, and who fits nowhere fails.
void TestSplitDecodes() {
  Setting now(2, MissPolicy::kSplit);
  std::vector<Sequence*> all;
  for (int32_t i = 0; i < 3; ++i) all.push_back(now.Add(2, 100 * i));
  CHECK_EQ(now.Step().items.size(), 3u);
  CHECK_EQ(now.Step().items.size(), 2u);
  CHECK(Misses(now.plan, Phase::kDecode, 3, 3, 1, BucketMiss::kNone));
  CHECK(now.plan.misses.empty() && !now.plan.prefill);
  CHECK(now.plan.items[0].sequence == all[0] && now.plan.items[1].sequence == all[1]);
  CHECK_EQ(now.Step().items.size(), 2u);
  CHECK(now.plan.items[0].sequence == all[0] && now.plan.items[1].sequence == all[2]);  // it waited longest

  now.scheduler.Enable(1, false);
  CHECK(now.Step().items.size() == 3 && now.plan.graph == 0);  // a prefill graph serves them
  now.scheduler.Enable(0, false);
  CHECK(now.Step().items.empty());
  CHECK_EQ(now.plan.misses.size(), 3u);
}

}  // namespace

int main() {
  TestPrefillInALargerGraph();
  TestAdmittedInALargerGraph();
  TestPrefillFails();
  TestSplitDecodes();
  return Finish("scheduler_test");
}
