// Warm-up: what a load replays, and that graphs which are off change where requests run, never what they answer.
#include <random>

#include "support/engine_harness.h"

using namespace llmc_test;

namespace {

void TestLoads() {
  NullDevice* device;
  ModelShape m = Usual();
  auto engine = Make(m, 65, {}, &device);
  // Prefill 4 × 4 tokens: as serving runs it, each sequence a row of the batch.
  CHECK_OK(engine->WarmGraph(1, {}, nullptr));
  CHECK_EQ(device->dummy_seqs, 4u);
  CHECK_EQ(device->max_tokens_seen, 16u);
  CHECK_OK(engine->WarmGraph(1, {1, 0, 0}, nullptr));
  CHECK_EQ(device->dummy_seqs, 5u);
  CHECK_OK(engine->WarmGraph(1, {3, 2, 40}, nullptr));
  CHECK_EQ(device->dummy_seqs, 8u);
  CHECK_OK(engine->WarmGraph(5, {8, 1, 64}, nullptr));
  CHECK_EQ(device->dummy_seqs, 16u);
  const uint64_t runs = device->runs;
  for (const WarmLoad& load : {WarmLoad{5, 1, 1}, WarmLoad{1, 17, 17}, WarmLoad{2, 9, 9}, WarmLoad{1, 8, 7},
                               WarmLoad{1, 1, 65}, WarmLoad{UINT32_MAX, 1, 1}}) {
    CHECK_EQ(engine->WarmGraph(1, load, nullptr).code, LLMC_ERR_OUT_OF_RANGE);
  }
  CHECK_EQ(engine->WarmGraph(6, {1, 1, 1}, nullptr).code, LLMC_ERR_OUT_OF_RANGE);
  CHECK_EQ(engine->EnableGraph(6, true).code, LLMC_ERR_OUT_OF_RANGE);
  CHECK_EQ(engine->WalkGraph(6, nullptr).code, LLMC_ERR_OUT_OF_RANGE);
  CHECK_EQ(device->walks, 0u);
  for (uint32_t g = 0; g < 6; ++g) {
    CHECK_OK(engine->WalkGraph(g, nullptr));
    CHECK_EQ(device->last_graph, g);
    CHECK_EQ(device->walks, g + 1u);
  }
  CHECK_EQ(device->runs, runs);
  CHECK_EQ(engine->Stats().num_steps, 0u);
}

// A warm-up beside requests leaves their states alone.
void TestStatesStay() {
  NullDevice* device;
  ModelShape m = Usual();
  m.state_bytes = sizeof(NullDevice::State);
  auto engine = Make(m, 65, {}, &device);
  std::vector<Job> jobs;
  for (uint32_t length : {3u, 9u, 17u, 30u}) jobs.push_back(Simple(length, 20));
  for (Job& job : jobs) CHECK_OK(Submit(engine.get(), &job));
  Outputs outputs;
  uint32_t graph = 0;
  for (bool progressed = true; progressed; graph = (graph + 1) % 6) {
    CHECK_OK(engine->Step(&progressed));
    CHECK_OK(engine->WarmGraph(graph, {}, nullptr));
    const uint32_t each = graph < 2 ? 2 : 1;
    for (uint32_t context : {each, each + 3, each + 4, 62u})
      CHECK_OK(engine->WarmGraph(graph, {1, each, context}, nullptr));
    Drain(engine.get(), &outputs);
  }
  CHECK(device->dummy_seqs > 100 && device->states_read > 60);
  for (const Job& job : jobs) Compare(outputs[{job.id, 0}], Reference(job, 0, 64));
}

// Graphs come and go between steps, the largest of each phase stays: no miss, and the same answers.
void TestAnyGraphsSameAnswers(uint32_t seed) {
  std::mt19937 rng(seed);
  auto pick = [&](uint32_t low, uint32_t high) { return low + static_cast<uint32_t>(rng() % (high - low + 1)); };
  NullDevice* device;
  auto engine = Make(Usual(), 129, {}, &device);
  std::vector<bool> on(6, true);
  const auto flip = [&] {
    const uint32_t g = std::vector<uint32_t>{0, 2, 3, 4}[pick(0, 3)];
    on[g] = !on[g];
    CHECK_OK(engine->EnableGraph(g, on[g]));
  };
  for (int i = 0; i < 3; ++i) flip();
  std::vector<Job> jobs;
  for (uint32_t i = 0; i < 12; ++i) jobs.push_back(Simple(pick(1, 40), pick(1, 12)));
  for (Job& job : jobs) {
    if (pick(0, 3) == 0) job.num_prompt_logprobs = 2;
  }
  Outputs outputs;
  size_t submitted = 0;
  bool progressed = true;
  while (submitted < jobs.size() || progressed) {
    if (submitted < jobs.size() && pick(0, 1)) CHECK_OK(Submit(engine.get(), &jobs[submitted++]));
    CHECK_OK(engine->Step(&progressed));
    CHECK_OK(engine->CheckIntegrity());
    if (progressed) CHECK(on[device->last_graph]);
    Drain(engine.get(), &outputs);
    flip();
  }
  for (const Job& job : jobs) Compare(outputs[{job.id, 0}], Reference(job, 0, 64));
  CHECK_EQ(engine->Stats().num_bucket_misses, 0u);
}

void TestWithoutGraphsItMisses() {
  auto engine = Make(Usual(), 65, {});
  for (uint32_t g = 0; g < 6; ++g) CHECK_OK(engine->EnableGraph(g, false));
  Job job = Simple(5, 2), next = Simple(5, 2);
  Outputs outputs;
  CHECK_OK(Submit(engine.get(), &job));
  RunAll(engine.get(), &outputs);
  CHECK_EQ((outputs[{job.id, 0}].error), LLMC_ERR_BUCKET_MISS);
  for (uint32_t g : {1u, 5u}) CHECK_OK(engine->EnableGraph(g, true));
  CHECK_OK(Submit(engine.get(), &next));
  RunAll(engine.get(), &outputs);
  Compare(outputs[{next.id, 0}], Reference(next, 0, 64));
}

}  // namespace

int main() {
  TestLoads();
  TestStatesStay();
  for (uint32_t seed = 0; seed < 200; ++seed) TestAnyGraphsSameAnswers(seed);
  TestWithoutGraphsItMisses();
  return Finish("warm_up_test");
}
