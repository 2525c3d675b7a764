// Memory that runs out in any allocation of submit and set_token_mask: the call fails and leaves no trace. In any
// allocation of step: every request fails, once, and the engine serves on.
#include <new>

#include "support/failing_new.h"
#include "support/ranked_reference.h"

using namespace llmc_test;

namespace {

// Fails the first, second, … allocation of `call` until it succeeds; returns how often it failed.
template <class Call>
int FailEach(Engine* engine, const Call& call) {
  for (int failed = 0;; ++failed) {
    const uint32_t waiting = engine->Stats().num_waiting, ready = engine->Wait(0);
    Status status;
    allocations_left = failed;
    try {
      status = call();
      allocations_left = -1;
      CHECK_OK(status);
      return failed;
    } catch (const std::bad_alloc&) {
      allocations_left = -1;
    }
    CHECK_EQ(engine->Stats().num_waiting, waiting);
    CHECK_EQ(engine->Wait(0) & LLMC_READY_EVENTS, ready & LLMC_READY_EVENTS);
    bool progressed;
    CHECK_OK(engine->Step(&progressed));
    CHECK_OK(engine->CheckIntegrity());
  }
}

struct Reached {
  uint64_t copies = 0, preemptions = 0, mixed = 0, hits = 0, scored = 0, masks = 0, accepted = 0, ahead = 0;
};

uint32_t speculate = 0;  // of engines made from now on: guesses of a sequence; of two, by a draft
bool recurrent = false;  // so are models of engines made from now on

// Requests of every kind in a pool too small for all of them. Allocation `allocation` of step `step` fails, and
// `failures` - 1 after it; returns false when the step makes fewer, or there is no such step.
bool FailStep(int step, long allocation, long failures, bool* reached_step, Reached* reached) {
  ModelShape shape = Usual();
  AddGraph(&shape, Phase::kMixed, 12, 8, 16);
  if (recurrent) shape.state_bytes = sizeof(NullDevice::State);
  NullDevice* device;
  EngineOptions options;
  options.swap_always = true;
  options.swap_bytes = recurrent ? 40 * (shape.kv_block_bytes + shape.state_bytes) : 0;
  options.speculate_tokens = speculate;
  options.speculate_always = true;
  const uint32_t blocks = recurrent ? 18 : 24;  // there, also prompts that are read at the same time share blocks
  auto engine = speculate > 1 ? MakeDrafted(shape, blocks, options, Usual(), 24, 30, &device)
                              : Make(shape, blocks, options, &device);
  std::vector<Job> jobs;
  const auto submit = [&](uint32_t length, uint32_t max_tokens) -> Job& {
    jobs.push_back(Simple(length, max_tokens));
    return jobs.back();
  };
  submit(9, 20).biases.push_back({3, 20});  // one token over and over: guesses are right
  submit(17, 8).params.n = 3;
  submit(30, 12).num_prompt_logprobs = 2;
  submit(21, 6).guided = true;
  submit(13, 6).deadline_ns = UINT64_MAX;
  submit(11, 5).params.beam_width = 3;
  submit(7, 4).params.best_of = 2;
  for (Job& job : jobs) CHECK_OK(Submit(engine.get(), &job));
  Outputs outputs;
  Needs needs;
  bool failed = false, progressed = true;
  const auto one = [&] {
    CHECK_OK(engine->CheckIntegrity());
    Drain(engine.get(), &outputs, &needs);
    for (const auto& need : needs) {
      const Job& j = *std::find_if(jobs.begin(), jobs.end(), [&](const Job& job) { return job.id == need.first; });
      SetMask(engine.get(), j.id, need.second, j.prompt, outputs[need].tokens);
      ++reached->masks;
    }
    progressed |= !needs.empty();
    needs.clear();
  };
  one();
  for (int i = 0; progressed && !failed; ++i) {
    if (i == 6) {  // arrives while others decode
      Job& late = submit(25, 4);
      CHECK_OK(Submit(engine.get(), &late));
    }
    *reached_step |= i == step;
    allocations_left = i == step ? allocation : -1;
    failures_left = failures;
    try {
      const Status status = engine->Step(&progressed);
      allocations_left = -1;
      CHECK_OK(status);
    } catch (const std::bad_alloc&) {
      allocations_left = -1;
      failed = true;
      CHECK(engine->Wait(0) & (LLMC_READY_EVENTS | LLMC_READY_WORK));
    }
    one();
  }
  const llmc_engine_stats stats = engine->Stats();
  reached->copies += device->copies;
  reached->preemptions += stats.num_preemptions;
  reached->mixed += stats.num_mixed_steps;
  reached->hits += stats.cached_tokens;
  reached->accepted += stats.accepted_tokens;
  reached->ahead += stats.num_ahead_steps;
  for (const auto& [id, output] : outputs) reached->scored += output.prompt.size();
  while (engine->Wait(0) & LLMC_READY_WORK) {
    CHECK_OK(engine->Step(&progressed));
    one();
  }
  static std::vector<std::vector<Output>> references;  // of jobs, which are the same each time
  for (size_t i = 0; i < jobs.size(); ++i) {
    const Job& job = jobs[i];
    if (i == references.size()) references.push_back(ReferenceOutputs(job, 64));
    for (uint32_t k = 0; k < job.params.n; ++k) {
      const Output& got = outputs[{job.id, k}];
      const Output& want = references[i][k];
      CHECK_EQ(got.terminal, 1);
      if (got.kind == LLMC_EVENT_FAILED) {
        CHECK(failed);
        CHECK_EQ(got.error, static_cast<int32_t>(LLMC_ERR_OUT_OF_MEMORY));
        CHECK_EQ(got.end.num_output_tokens, got.tokens.size());
        CHECK(got.tokens.size() <= want.tokens.size() &&
              std::equal(got.tokens.begin(), got.tokens.end(), want.tokens.begin()));
      } else {
        Compare(got, want);
      }
    }
  }
  const llmc_engine_stats after = engine->Stats();
  CHECK(after.num_running == 0 && after.num_waiting == 0 && after.num_free_blocks == after.num_blocks);
  CHECK_EQ(after.num_finished, jobs.size());
  Job next = Simple(33, 5);
  CHECK_OK(Submit(engine.get(), &next));
  RunAll(engine.get(), &outputs);
  Compare(outputs[{next.id, 0}], Reference(next, 0, 64));
  return failed;
}

void TestStep() {
  Reached reached;
  int points = 0;
  bool more = true;
  for (int step = 0; more; ++step) {
    more = false;
    for (long allocation = 0; FailStep(step, allocation, 1, &more, &reached); ++allocation) ++points;
    for (long failures : {2, 3, -1}) FailStep(step, 0, failures, &more, &reached);
  }
  std::printf("%d allocations of step failed\n", points);
  CHECK(points > 100);
  CHECK(reached.copies > 0 && reached.preemptions > 0 && reached.mixed > 0 && reached.hits > 0 && reached.scored > 0 &&
        reached.masks > 0);
  CHECK_EQ(reached.accepted > 0, speculate > 0);
  CHECK_EQ(reached.ahead > 0, NullDevice::late && speculate == 0);
}

}  // namespace

int main() {
  for (speculate = 0; speculate < 3; ++speculate) {
    NullDevice::late = speculate == 1;
    TestStep();
  }
  speculate = 0;
  NullDevice::late = true;
  TestStep();
  NullDevice::draws = NullDevice::chains = true;
  TestStep();
  NullDevice::late = NullDevice::draws = NullDevice::chains = false;
  recurrent = true;
  TestStep();
  recurrent = false;
  auto engine = Make(Usual(), 65, {});
  Outputs outputs;
  Needs needs;
  for (int i = 0; i < 40; ++i) {  // containers grow now and then
    Job job = Simple(5, 3);
    job.guided = i % 2 == 0;
    job.params.n = 2;
    CHECK(FailEach(engine.get(), [&] { return Submit(engine.get(), &job); }) > 2);
    CHECK_EQ(job.id, static_cast<uint64_t>(i) + 1);
    for (bool more = true; more || !needs.empty();) {
      Drain(engine.get(), &outputs, &needs);
      for (const auto& need : needs) {
        std::vector<int32_t> tokens = job.prompt;
        tokens.insert(tokens.end(), outputs[need].tokens.begin(), outputs[need].tokens.end());
        const std::vector<uint32_t> mask = MaskOf(tokens);
        FailEach(engine.get(), [&] { return engine->SetTokenMasks(job.id, need.second, mask.data(), mask.size()); });
      }
      needs.clear();
      CHECK_OK(engine->Step(&more));
      CHECK_OK(engine->CheckIntegrity());
      Drain(engine.get(), &outputs, &needs);
    }
    for (uint32_t k = 0; k < 2; ++k) Compare(outputs[{job.id, k}], Reference(job, k, 64));
  }
  return Finish("engine_memory_test");
}
