// Waiting requests of a higher priority take the place of running ones of a lower one, for whatever they lack, and no more
// of them than they need; nobody waits behind higher priorities for ever; no bit of a result changes.
#include <random>

#include "support/engine_harness.h"

using namespace llmc_test;

namespace {

Job With(int32_t priority, uint32_t length, uint32_t max_tokens, int32_t first = 1) {
  Job j = Simple(length, max_tokens);
  j.prompt[0] = first;
  j.priority = priority;
  return j;
}

void Steps(Engine* engine, Outputs* outputs, int count) {
  bool progressed;
  for (int i = 0; i < count; ++i) {
    CHECK_OK(engine->Step(&progressed));
    CHECK_OK(engine->CheckIntegrity());
    Drain(engine, outputs);
  }
}

void RunUntilEnd(Engine* engine, Outputs* outputs, const Job& job) {
  for (int i = 0; i < 1000 && (*outputs)[{job.id, 0}].terminal == 0; ++i) Steps(engine, outputs, 1);
}

bool Ended(Outputs& outputs, const Job& job) { return outputs[{job.id, 0}].terminal != 0; }

// A seat: the youngest of the lowest priority gives up its own, and goes on when there is room again.
void TestSeat() {
  EngineOptions options;
  options.max_num_seqs = 3;
  auto engine = Make(Usual(), 65, options);
  Job older = With(5, 6, 20), younger = With(5, 6, 20, 2), middle = With(2, 6, 20, 3), high = With(-1, 6, 4, 4);
  Outputs outputs;
  for (Job* j : {&older, &younger, &middle}) CHECK_OK(Submit(engine.get(), j));
  Steps(engine.get(), &outputs, 4);
  CHECK_OK(Submit(engine.get(), &high));
  RunUntilEnd(engine.get(), &outputs, high);
  CHECK(!Ended(outputs, older) && !Ended(outputs, middle));
  const llmc_engine_stats stats = engine->Stats();
  CHECK_EQ(stats.num_evictions, 1u);
  CHECK_EQ(stats.num_preemptions, 1u);
  const size_t before = outputs[{younger.id, 0}].tokens.size();
  CHECK(outputs[{older.id, 0}].tokens.size() > before && outputs[{middle.id, 0}].tokens.size() > before);
  RunAll(engine.get(), &outputs);
  for (Job* j : {&older, &younger, &middle, &high}) Compare(outputs[{j->id, 0}], Reference(*j, 0, 64));
  const std::vector<llmc_eviction_count> evictions = engine->Evictions();
  CHECK(evictions.size() == 1 && evictions[0].priority == 5 && evictions[0].count == 1);
}

// Blocks: as many as it takes, counting what continuations share once, and nobody where even all would not do.
void TestBlocks() {
  auto engine = Make(Usual(), 13, {});  // 12 blocks of 4 tokens
  Job twins = With(3, 12, 4), low = With(4, 7, 8, 2), high = With(1, 39, 2, 3);
  twins.params.n = 2;
  Outputs outputs;
  CHECK_OK(Submit(engine.get(), &twins));
  CHECK_OK(Submit(engine.get(), &low));
  Steps(engine.get(), &outputs, 4);
  CHECK_OK(Submit(engine.get(), &high));
  RunUntilEnd(engine.get(), &outputs, high);
  CHECK(outputs[{twins.id, 0}].terminal == 0 && outputs[{twins.id, 1}].terminal == 0 && !Ended(outputs, low));
  CHECK_EQ(engine->Stats().num_evictions, 3u);
  RunAll(engine.get(), &outputs);
  for (uint32_t i : {0u, 1u}) Compare(outputs[{twins.id, i}], Reference(twins, i, 48));
  Compare(outputs[{low.id, 0}], Reference(low, 0, 48));
  Compare(outputs[{high.id, 0}], Reference(high, 0, 48));

  Job first = With(0, 30, 12), small = With(2, 4, 8, 2), wide = With(1, 39, 2, 3);
  for (Job* j : {&first, &small}) CHECK_OK(Submit(engine.get(), j));
  Steps(engine.get(), &outputs, 3);
  CHECK_OK(Submit(engine.get(), &wide));
  Steps(engine.get(), &outputs, 3);
  CHECK_EQ(engine->Stats().num_evictions, 3u);  // small's blocks would not do: it stays
  RunAll(engine.get(), &outputs);
  for (Job* j : {&first, &small, &wide}) Compare(outputs[{j->id, 0}], Reference(*j, 0, 48));
}

// A decode graph: with the newcomer no graph would hold all, so steps would be split. Those in its way wait until a graph
// holds them again, and where all have one priority nobody does.
void TestDecodeGraph() {
  ModelShape shape = Shape(4, 64, 8);
  AddGraph(&shape, Phase::kPrefill, 16, 4, 16);
  AddGraph(&shape, Phase::kDecode, 4, 4, 3);
  AddGraph(&shape, Phase::kDecode, 2, 2, 16);
  EngineOptions options;
  options.miss_policy = MissPolicy::kSplit;
  for (const bool equal : {false, true}) {
    auto engine = Make(shape, 65, options);
    std::vector<Job> low;
    for (int32_t i = 0; i < 3; ++i) low.push_back(With(1, 3, 8, 10 + i));
    Job high = With(equal ? 1 : 0, 14, 6, 2);  // more than 3 blocks
    Outputs outputs;
    for (Job& j : low) CHECK_OK(Submit(engine.get(), &j));
    Steps(engine.get(), &outputs, 2);
    CHECK_OK(Submit(engine.get(), &high));
    RunUntilEnd(engine.get(), &outputs, high);
    CHECK_EQ(engine->Stats().num_evictions, equal ? 0u : 2u);
    CHECK_EQ(engine->Stats().num_bucket_misses > 0, equal);
    RunAll(engine.get(), &outputs);
    for (const Job& j : low) Compare(outputs[{j.id, 0}], Reference(j, 0, 64));
    Compare(outputs[{high.id, 0}], Reference(high, 0, 64));
  }
}

// Requests of a high priority never end, and a queue of low ones waits: one after the other they get through, each after
// `patience` steps, the oldest first, and nobody takes its place. All others are of the high priority.
void TestPatience() {
  constexpr uint32_t kPatience = 20;
  EngineOptions options;
  options.max_num_seqs = 2;
  options.priority_patience = kPatience;
  auto engine = Make(Usual(), 65, options);
  std::vector<Job> low;
  for (int32_t i = 0; i < 3; ++i) low.push_back(With(9, 5, 6, 10 + i));
  Outputs outputs;
  for (Job& j : low) CHECK_OK(Submit(engine.get(), &j));
  std::vector<Job> high;
  high.reserve(1000);
  uint32_t ended = 0, since = 0;
  for (int step = 0; step < 400 && ended < 3; ++step) {
    while (engine->Stats().num_waiting + engine->Stats().num_running < 3 + 3 - ended) {
      high.push_back(With(0, 5, 7, static_cast<int32_t>(high.size() % 40)));
      CHECK_OK(Submit(engine.get(), &high.back()));
    }
    Steps(engine.get(), &outputs, 1);
    ++since;
    if (!Ended(outputs, low[ended])) continue;
    CHECK_EQ(engine->Stats().num_promotions, ended + 1u);
    CHECK(since >= kPatience && since <= kPatience + 30);
    for (uint32_t i = ended + 1; i < 3; ++i) CHECK(!Ended(outputs, low[i]));
    ++ended;
    since = 0;
  }
  CHECK_EQ(ended, 3u);
  RunAll(engine.get(), &outputs);
  for (const Job& j : low) Compare(outputs[{j.id, 0}], Reference(j, 0, 64));
  for (const Job& j : high) Compare(outputs[{j.id, 0}], Reference(j, 0, 64));
}

// A promoted request takes all its continuations along, is not evicted, and a cancelled one leaves nothing behind.
void TestPromotedRequest() {
  EngineOptions options;
  options.max_num_seqs = 4;
  options.priority_patience = 5;
  auto engine = Make(Usual(), 65, options);
  Outputs outputs;
  std::vector<Job> high;
  high.reserve(8);
  for (int32_t i = 0; i < 4; ++i) {
    high.push_back(With(0, 5, 40, i));
    CHECK_OK(Submit(engine.get(), &high.back()));
  }
  Job low = With(1, 5, 10, 20), next = With(1, 5, 3, 21);
  low.params.n = 3;
  for (Job* j : {&low, &next}) CHECK_OK(Submit(engine.get(), j));
  Steps(engine.get(), &outputs, 14);
  CHECK_EQ(engine->Stats().num_promotions, 1u);
  CHECK_EQ(engine->Stats().num_evictions, 3u);  // the three youngest of the high ones
  for (uint32_t i = 0; i < 3; ++i) CHECK((outputs[{low.id, i}].tokens.size() >= 1));
  CHECK_OK(engine->Cancel(low.id));
  RunAll(engine.get(), &outputs);
  for (const Job& j : high) Compare(outputs[{j.id, 0}], Reference(j, 0, 64));
  Compare(outputs[{next.id, 0}], Reference(next, 0, 64));
}

// Of one priority, nobody is evicted or promoted, however long the queue.
void TestOnePriority() {
  EngineOptions options;
  options.max_num_seqs = 2;
  options.priority_patience = 1;
  auto engine = Make(Usual(), 13, options);
  std::vector<Job> jobs;
  for (int32_t i = 0; i < 12; ++i) jobs.push_back(With(7, 8, 12, i));
  Outputs outputs;
  for (Job& j : jobs) CHECK_OK(Submit(engine.get(), &j));
  RunAll(engine.get(), &outputs);
  CHECK(engine->Stats().num_evictions == 0 && engine->Stats().num_promotions == 0 && engine->Evictions().empty());
  for (const Job& j : jobs) Compare(outputs[{j.id, 0}], Reference(j, 0, 48));
}

// More priorities than are told apart.
void TestManyPriorities() {
  EngineOptions options;
  options.max_num_seqs = 1;
  options.priority_patience = 1u << 30;
  auto engine = Make(Usual(), 65, options);
  std::vector<Job> jobs;
  jobs.reserve(80);
  Outputs outputs;
  for (int32_t i = 0; i < 80; ++i) {
    jobs.push_back(With(-i, 3, 4, i % kVocab));
    CHECK_OK(Submit(engine.get(), &jobs.back()));
    Steps(engine.get(), &outputs, 1);
  }
  RunAll(engine.get(), &outputs);
  CHECK_EQ(engine->Stats().num_evictions, 79u);
  CHECK_EQ(engine->Evictions().size(), static_cast<size_t>(LLMC_MAX_EVICTED_PRIORITIES));
  for (const Job& j : jobs) Compare(outputs[{j.id, 0}], Reference(j, 0, 64));
}

}  // namespace

int main() {
  TestSeat();
  TestBlocks();
  TestDecodeGraph();
  TestPatience();
  TestPromotedRequest();
  TestOnePriority();
  TestManyPriorities();
  return Finish("eviction_test");
}
