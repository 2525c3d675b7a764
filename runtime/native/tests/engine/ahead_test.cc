// Steps that are prepared while the one before runs, or chained to it: which are, in what order the device is asked, who waits for whom, and
// what becomes of rows whose sequences have ended. Their bits engine_fuzz_test compares.
#include <string>
#include <utility>

#include "support/engine_harness.h"

using namespace llmc_test;

namespace {

// Says in what order it was asked for steps, and waited for.
class Ordered final : public NullDevice {
 public:
  using NullDevice::NullDevice;
  Status Enqueue(const StepBatch& b, Fence* fence) override {
    said += 'E';
    return NullDevice::Enqueue(b, fence);
  }
  Status Wait(Fence fence, const float** logits) override {
    said += 'W';
    if (on_wait) on_wait();
    return NullDevice::Wait(fence, logits);
  }
  Status Await(Fence fence) override {
    said += 'A';
    const float* logits = nullptr;
    return NullDevice::Wait(fence, &logits);
  }
  Status Chain(const std::vector<SampleTask>& tasks, const StepBatch& next, const std::vector<DrawnRow>& drawn,
               Fence* fence, bool* chained) override {
    const Status status = NullDevice::Chain(tasks, next, drawn, fence, chained);
    if (*chained) said += 'C';
    if (on_chain) on_chain();
    return status;
  }
  std::string said;
  std::function<void()> on_wait, on_chain;
};

std::unique_ptr<Engine> MakeOrdered(Ordered** device, uint32_t blocks = 65, const EngineOptions& options = {},
                                    const ModelShape& shape = Usual()) {
  auto made = std::make_unique<Ordered>(shape, blocks);
  *device = made.get();
  std::unique_ptr<Engine> engine;
  CHECK_OK(Engine::Create(std::move(made), options, &engine));
  return engine;
}

void StepOnce(Engine* engine) {
  bool more = false;
  CHECK_OK(engine->Step(&more));
  CHECK_OK(engine->CheckIntegrity());
  CHECK(more);
}

// Submits requests of some prompt lengths and maxima.
std::vector<Job> SubmitAll(Engine* engine, std::initializer_list<std::pair<uint32_t, uint32_t>> sizes) {
  std::vector<Job> jobs;
  for (const auto& [length, max_tokens] : sizes) {
    jobs.push_back(Simple(length, max_tokens));
    CHECK_OK(Submit(engine, &jobs.back()));
  }
  return jobs;
}

void CompareAll(const std::vector<Job>& jobs, Outputs* outputs) {
  for (const Job& job : jobs) Compare((*outputs)[{job.id, 0}], Reference(job, 0, 64));
}

// When Step has told a token, the next step is on its way; the last one has none behind it, since its length ends it.
void TestOrder() {
  Ordered* device;
  auto engine = MakeOrdered(&device);
  const std::vector<Job> jobs = SubmitAll(engine.get(), {{5, 4}, {6, 3}});
  Outputs outputs;
  const char* const wanted[] = {"EWE", "EWEWE", "EWEWEWE", "EWEWEWEW"};
  for (size_t i = 0; i < 4; ++i) {
    StepOnce(engine.get());
    CHECK(device->said == wanted[i]);
    Drain(engine.get(), &outputs);
    CHECK_EQ(outputs[std::pair(jobs[0].id, 0u)].tokens.size(), i + 1);
    CHECK_EQ(outputs[std::pair(jobs[1].id, 0u)].terminal, i >= 2);
  }
  CompareAll(jobs, &outputs);
  const llmc_engine_stats stats = engine->Stats();
  CHECK_EQ(stats.num_ahead_steps, 3u);
  CHECK_EQ(stats.num_thrown_rows, 0u);
  CHECK_EQ(stats.num_steps, 4u);
  CHECK_EQ(engine->Wait(0), 0u);
}

// Prepared means before the device has finished: a plan needs blocks, and these are taken when it is waited for. Blocks
// are full behind 4 tokens, so that the step behind a prompt of 4 needs one more.
void TestPreparedMeanwhile() {
  Ordered* device;
  ModelShape shape = Usual();
  shape.graphs.clear();
  AddGraph(&shape, Phase::kPrefill, 16, 4, 16);
  AddGraph(&shape, Phase::kDecode, 8, 8, 16);
  auto engine = MakeOrdered(&device, 65, {}, shape);
  const std::vector<Job> jobs = SubmitAll(engine.get(), {{4, 6}});
  uint32_t waits = 0;
  device->on_wait = [&] {
    if (++waits != 1) return;
    // Somebody who comes while the device runs, behind the plan: the plan is dropped, and both run in the next step.
    std::vector<Job> late = SubmitAll(engine.get(), {{3, 1}});
  };
  StepOnce(engine.get());
  CHECK(device->said == "EW");
  CHECK_EQ(engine->Stats().num_ahead_steps, 0u);
  CHECK_EQ(engine->Stats().num_blocks - engine->Stats().num_free_blocks, 2u);  // that of the dropped plan, too
  Outputs outputs;
  RunAll(engine.get(), &outputs);
  CompareAll(jobs, &outputs);
}

// Somebody who comes between two steps waits for the one that is on its way, and for no other.
void TestArrivalsWaitForOneStep() {
  Ordered* device;
  auto engine = MakeOrdered(&device);
  std::vector<Job> jobs = SubmitAll(engine.get(), {{5, 12}});
  StepOnce(engine.get());
  StepOnce(engine.get());
  CHECK(device->said == "EWEWE");
  jobs.push_back(Simple(9, 2));
  CHECK_OK(Submit(engine.get(), &jobs.back()));
  StepOnce(engine.get());
  CHECK(device->said == "EWEWEW");
  StepOnce(engine.get());
  CHECK_EQ(engine->Stats().num_prefill_steps, 2u);
  Outputs outputs;
  RunAll(engine.get(), &outputs);
  CompareAll(jobs, &outputs);
}

// Those who wait for a seat that is not free keep nobody from running ahead; for one that becomes free they do.
void TestFullSeats() {
  Ordered* device;
  EngineOptions options;
  options.max_num_seqs = 2;
  auto engine = MakeOrdered(&device, 65, options);
  const std::vector<Job> jobs = SubmitAll(engine.get(), {{5, 5}, {6, 9}, {7, 3}});
  Outputs outputs;
  RunAll(engine.get(), &outputs);
  CompareAll(jobs, &outputs);
  // Two prompts and the first four tokens; then the third prompt.
  CHECK(device->said.substr(0, 12) == "EWEWEWEWEWEW");
  CHECK(engine->Stats().num_ahead_steps >= 5);
}

// Steps that were prepared count, too, where somebody waits behind a higher priority.
void TestPatience() {
  Ordered* device;
  EngineOptions options;
  options.max_num_seqs = 1;
  options.priority_patience = 5;
  auto engine = MakeOrdered(&device, 65, options);
  std::vector<Job> jobs = {Simple(5, 30), Simple(6, 2)};
  jobs[1].priority = 1;
  for (Job& job : jobs) CHECK_OK(Submit(engine.get(), &job));
  for (int i = 0; i < 5; ++i) StepOnce(engine.get());
  CHECK(engine->Stats().num_ahead_steps >= 4);
  CHECK_EQ(engine->Stats().num_promotions, 1u);
  Outputs outputs;
  RunAll(engine.get(), &outputs);
  CompareAll(jobs, &outputs);
  CHECK_EQ(engine->Stats().num_evictions, 1u);
}

// A sequence that stops in a step has a row in the next one, and its blocks until that has ended.
void TestThrownRows() {
  Ordered* device;
  auto engine = MakeOrdered(&device);
  std::vector<Job> jobs = {Simple(5, 8), Simple(4, 9)};
  jobs[0].stops = {Reference(jobs[0], 0, 64).tokens[2]};
  CHECK_EQ(Reference(jobs[0], 0, 64).tokens.size(), 2u);
  for (Job& job : jobs) CHECK_OK(Submit(engine.get(), &job));
  for (int i = 0; i < 3; ++i) StepOnce(engine.get());
  Outputs outputs;
  Drain(engine.get(), &outputs);
  CHECK_EQ(outputs[std::pair(jobs[0].id, 0u)].terminal, 1);
  const auto taken = [&] { return engine->Stats().num_blocks - engine->Stats().num_free_blocks; };
  CHECK_EQ(taken(), 4u);
  CHECK_EQ(engine->Stats().num_thrown_rows, 0u);
  CHECK_EQ(engine->Cancel(jobs[0].id).code, static_cast<int32_t>(LLMC_ERR_NOT_FOUND));
  StepOnce(engine.get());
  CHECK_EQ(taken(), 2u);
  CHECK_EQ(engine->Stats().num_thrown_rows, 1u);
  RunAll(engine.get(), &outputs);
  CompareAll(jobs, &outputs);
  // Where the last one stops there is nothing to run ahead for.
  device->said.clear();
  Job last = Simple(5, 8);
  last.stops = jobs[0].stops;
  CHECK_OK(Submit(engine.get(), &last));
  RunAll(engine.get(), &outputs);
  CHECK(device->said == "EWEWEW");
}

// Who is cancelled while a step is on its way gets nothing more, and the others all.
void TestCancelled() {
  for (const bool all : {false, true}) {
    Ordered* device;
    auto engine = MakeOrdered(&device);
    std::vector<Job> jobs = SubmitAll(engine.get(), {{5, 8}, {6, 8}});
    StepOnce(engine.get());
    CHECK_OK(engine->Cancel(jobs[0].id));
    if (all) CHECK_OK(engine->Cancel(jobs[1].id));
    CHECK(engine->Wait(0) & LLMC_READY_WORK);
    Outputs outputs;
    RunAll(engine.get(), &outputs);
    CHECK_EQ(outputs[std::pair(jobs[0].id, 0u)].tokens.size(), 1u);
    CHECK_EQ(outputs[std::pair(jobs[0].id, 0u)].reason, static_cast<uint32_t>(LLMC_FINISH_CANCELLED));
    if (!all) Compare(outputs[{jobs[1].id, 0}], Reference(jobs[1], 0, 64));
    CHECK_EQ(engine->Stats().num_thrown_rows, all ? 2u : 1u);
    CHECK_EQ(engine->Stats().num_free_blocks, engine->Stats().num_blocks);
  }
}

// A device that fails tells all tokens of the steps before, and fails each request once.
void TestFailures() {
  for (int fails = 1; fails < 6; ++fails) {
    Ordered* device;
    auto engine = MakeOrdered(&device);
    std::vector<Job> jobs = SubmitAll(engine.get(), {{5, 9}, {6, 9}});
    device->fail_after = fails;
    Outputs outputs;
    Status status;
    bool more = true;
    int steps = 0;
    for (; status.ok() && steps < 20; ++steps) {
      status = engine->Step(&more);
      CHECK_OK(engine->CheckIntegrity());
    }
    CHECK_EQ(steps, fails);
    Drain(engine.get(), &outputs);
    for (const Job& job : jobs) {
      const Output& got = outputs[{job.id, 0}];
      CHECK_EQ(got.kind, static_cast<uint32_t>(LLMC_EVENT_FAILED));
      CHECK_EQ(got.tokens.size(), static_cast<size_t>(fails) - 1);
    }
    CHECK_EQ(engine->Stats().num_free_blocks, engine->Stats().num_blocks);
    jobs = SubmitAll(engine.get(), {{7, 5}});
    RunAll(engine.get(), &outputs);
    CompareAll(jobs, &outputs);
  }
}

// What needs a quiet device ends the step that is on its way, and its tokens are told.
void TestLanding() {
  Ordered* device;
  auto engine = MakeOrdered(&device);
  const std::vector<Job> jobs = SubmitAll(engine.get(), {{5, 6}});
  StepOnce(engine.get());
  CHECK(device->said == "EWE");
  CHECK_OK(engine->EnableGraph(0, false));
  CHECK(device->said == "EWEW");
  CHECK_OK(engine->WalkGraph(0, nullptr));
  CHECK_OK(engine->WarmGraph(3, {}, nullptr));
  CHECK(device->said == "EWEWEW");
  Outputs outputs;
  Drain(engine.get(), &outputs);
  CHECK_EQ(outputs[std::pair(jobs[0].id, 0u)].tokens.size(), 2u);
  CHECK(engine->Wait(0) & LLMC_READY_WORK);
  RunAll(engine.get(), &outputs);
  CompareAll(jobs, &outputs);
}

// What depends on the token that is drawn is planned behind it: for prompts that fork or are scored once, for others as
// long as they run.
void TestUnsure() {
  for (const std::string what : {"guided", "beams", "speculation", "n", "scored"}) {
    Ordered* device;
    EngineOptions options;
    options.speculate_tokens = what == "speculation" ? 2 : 0;
    auto engine = MakeOrdered(&device, 65, options);
    std::vector<Job> jobs = {Simple(5, 6), Simple(6, 3)};
    jobs[0].guided = what == "guided";
    jobs[0].params.n = what == "n" ? 2 : 1;
    jobs[0].params.beam_width = what == "beams" ? 2 : 0;
    jobs[0].num_prompt_logprobs = what == "scored" ? 0 : -1;
    for (Job& job : jobs) CHECK_OK(Submit(engine.get(), &job));
    Outputs outputs;
    Needs needs;
    StepOnce(engine.get());
    CHECK(device->said == "EW");
    for (bool more = true; more || !needs.empty();) {
      for (const auto& need : needs)
        SetMask(engine.get(), need.first, need.second, jobs[0].prompt, outputs[need].tokens);
      needs.clear();
      CHECK_OK(engine->Step(&more));
      CHECK_OK(engine->CheckIntegrity());
      Drain(engine.get(), &outputs, &needs);
    }
    CHECK_EQ(engine->Stats().num_finished, 2u);
    CHECK_EQ(engine->Stats().num_ahead_steps > 0, what == "n" || what == "scored");
    Compare(outputs[{jobs[1].id, 0}], Reference(jobs[1], 0, 64));
  }
}

// The next step is on its way before anybody waits for the tokens of the one before.
void TestChained() {
  Ordered* device;
  auto engine = MakeOrdered(&device);
  device->never_refuses = true;
  const std::vector<Job> jobs = SubmitAll(engine.get(), {{5, 4}, {6, 3}});
  Outputs outputs;
  for (const std::string wanted : {"ECW", "ECWCW", "ECWCWCW", "ECWCWCWW"}) {
    StepOnce(engine.get());
    CHECK(device->said == wanted);
  }
  RunAll(engine.get(), &outputs);
  CompareAll(jobs, &outputs);
  const llmc_engine_stats stats = engine->Stats();
  CHECK_EQ(stats.num_ahead_steps, 3u);
  CHECK_EQ(stats.num_thrown_rows, 0u);
  CHECK_EQ(stats.num_steps, 4u);
  CHECK_EQ(stats.num_free_blocks, stats.num_blocks);
  CHECK_EQ(engine->Wait(0), 0u);
}

// If the host must draw, the step ahead is waited for, without its logits, and given up, the step before runs again, and the next one behind
// its tokens. What the step in vain wrote to the KV cache is overwritten.
void TestLost() {
  Ordered* device;
  auto engine = MakeOrdered(&device);
  device->never_refuses = true;
  device->loses = 1;
  const std::vector<Job> jobs = SubmitAll(engine.get(), {{3, 5}, {6, 3}});
  StepOnce(engine.get());
  CHECK(device->said == "ECWAEWE");  // the logits of the step in vain are not read
  CHECK_EQ(engine->Stats().num_ahead_steps, 1u);
  Outputs outputs;
  RunAll(engine.get(), &outputs);
  CompareAll(jobs, &outputs);
  CHECK_EQ(device->lost_steps, device->chained_steps);
  CHECK_EQ(engine->Stats().num_ahead_steps, 4u);
  CHECK_EQ(engine->Stats().num_thrown_rows, 0u);
}

// A step that may be lost would fold tokens into a state twice: it is prepared instead.
void TestStatesAreNotChained() {
  Ordered* device;
  ModelShape shape = Usual();
  shape.state_bytes = sizeof(NullDevice::State);
  auto engine = MakeOrdered(&device, 65, {}, shape);
  device->never_refuses = true;
  device->loses = 1;
  const std::vector<Job> jobs = SubmitAll(engine.get(), {{5, 4}, {6, 3}});
  Outputs outputs;
  for (const std::string wanted : {"EWE", "EWEWE", "EWEWEWE", "EWEWEWEW"}) {
    StepOnce(engine.get());
    CHECK(device->said == wanted);
  }
  RunAll(engine.get(), &outputs);
  CompareAll(jobs, &outputs);
  CHECK_EQ(engine->Stats().num_ahead_steps, 3u);
  CHECK_EQ(device->chained_steps, 0u);
  CHECK(device->states_read > 0);
}

// A step whose sequences all stop is in vain. It holds their blocks until it has ended, and nothing is told of it.
void TestChainedInVain() {
  Ordered* device;
  auto engine = MakeOrdered(&device);
  device->never_refuses = true;
  std::vector<Job> jobs = {Simple(5, 8), Simple(4, 8)};
  for (Job& job : jobs) {
    job.stops = {Reference(job, 0, 64).tokens[1]};
    CHECK_OK(Submit(engine.get(), &job));
  }
  const size_t length = std::max(Reference(jobs[0], 0, 64).tokens.size(), Reference(jobs[1], 0, 64).tokens.size());
  Outputs outputs;
  RunAll(engine.get(), &outputs);
  CompareAll(jobs, &outputs);
  CHECK_EQ(engine->Stats().num_steps, length + 2);  // with the token that stops, and the step in vain
  CHECK_EQ(engine->Stats().num_thrown_rows, 2u);
  CHECK_EQ(device->unwanted_tasks, 2u);  // of those rows
  CHECK_EQ(engine->Stats().num_free_blocks, engine->Stats().num_blocks);
}

// Who comes before the next step is chained keeps it from being chained; who comes later waits for it alone. Who is
// cancelled meanwhile has a row that is thrown away.
void TestDisturbedChain() {
  Ordered* device;
  auto engine = MakeOrdered(&device);
  device->never_refuses = true;
  std::vector<Job> jobs = SubmitAll(engine.get(), {{5, 6}, {6, 6}});
  bool done = false;
  device->on_chain = [&] {
    if (std::exchange(done, true)) return;
    CHECK_OK(engine->Cancel(jobs[1].id));
    jobs.push_back(Simple(7, 3));
    CHECK_OK(Submit(engine.get(), &jobs.back()));
  };
  StepOnce(engine.get());
  CHECK(device->said == "ECW");
  StepOnce(engine.get());
  CHECK(device->said == "ECWW");
  Outputs outputs;
  RunAll(engine.get(), &outputs);
  CHECK_EQ(outputs[std::pair(jobs[1].id, 0u)].reason, static_cast<uint32_t>(LLMC_FINISH_CANCELLED));
  CHECK_EQ(outputs[std::pair(jobs[1].id, 0u)].tokens.size(), 1u);
  jobs.erase(jobs.begin() + 1);
  CompareAll(jobs, &outputs);
  CHECK_EQ(engine->Stats().num_thrown_rows, 1u);
}

}  // namespace

int main() {
  NullDevice::late = true;
  TestOrder();
  TestPreparedMeanwhile();
  TestArrivalsWaitForOneStep();
  TestFullSeats();
  TestPatience();
  TestThrownRows();
  TestCancelled();
  TestFailures();
  TestLanding();
  TestUnsure();
  NullDevice::draws = NullDevice::chains = true;
  TestChained();
  TestLost();
  TestStatesAreNotChained();
  TestChainedInVain();
  TestDisturbedChain();
  TestFailures();
  return Finish("ahead_test");
}
