// Guided decoding over a null device: masks, and sequences that wait for them.
#include <algorithm>
#include <chrono>
#include <deque>
#include <thread>

#include "support/engine_harness.h"

using namespace llmc_test;

namespace {

void TestGuided() {
  NullDevice* device;
  auto engine = Make(Usual(), 65, {}, &device);
  Job guided = Simple(12, 5), plain = Simple(9, 6);
  guided.guided = true;
  guided.params.n = 2;
  guided.params.temperature = 1;
  CHECK_OK(Submit(engine.get(), &guided));
  Outputs outputs;
  Needs needs;
  Drain(engine.get(), &outputs, &needs);
  CHECK(needs == Needs({{guided.id, 0}, {guided.id, 1}}));
  CHECK_OK(Submit(engine.get(), &plain));
  RunAll(engine.get(), &outputs);
  Compare(outputs[{plain.id, 0}], Reference(plain, 0, 64));
  // All of the prompt but its last token is done; nothing happens until both masks are there.
  CHECK_EQ(engine->Stats().scheduled_tokens, 11u + 9u + 5u);
  CHECK_EQ(engine->Stats().num_running, 1u);
  CHECK_EQ(engine->Wait(0), 0u);
  bool progressed;
  SetMask(engine.get(), guided.id, 0, guided.prompt, {});
  CHECK_EQ(engine->Wait(0), static_cast<uint32_t>(LLMC_READY_WORK));
  CHECK_OK(engine->Step(&progressed));
  CHECK(!progressed);
  CHECK_OK(engine->CheckIntegrity());
  SetMask(engine.get(), guided.id, 1, guided.prompt, {});
  needs.clear();
  Status in_flight;
  device->on_run = [&] { in_flight = engine->SetTokenMasks(guided.id, 0, MaskOf({}).data(), 2); };
  CHECK_OK(engine->Step(&progressed));
  CHECK(progressed);
  CHECK_EQ(in_flight.code, LLMC_ERR_INVALID_ARGUMENT);
  device->on_run = nullptr;
  for (int i = 0; i < 100; ++i) {
    Drain(engine.get(), &outputs, &needs);
    for (const auto& need : needs) {
      SetMask(engine.get(), guided.id, need.second, guided.prompt, outputs[need].tokens);
    }
    needs.clear();
    CHECK_OK(engine->Step(&progressed));
    CHECK_OK(engine->CheckIntegrity());
  }
  for (uint32_t i = 0; i < 2; ++i) Compare(outputs[{guided.id, i}], Reference(guided, i, 64));
}

// Every seat is taken by a continuation that waits for a mask, and as many wait in the queue: a plain request is served
// as if they were not there. When the masks come, they go on, with the same bits.
void TestParked() {
  EngineOptions options;
  options.max_num_seqs = 4;
  auto engine = Make(Usual(), 129, options);
  std::vector<Job> guided(3, Simple(6, 5));
  for (Job& j : guided) {
    j.guided = true;
    j.params.n = 4;
    j.params.temperature = 1;
    CHECK_OK(Submit(engine.get(), &j));
  }
  Outputs outputs;
  Needs needs;
  const auto step = [&](const std::vector<Job>& answered) {
    bool progressed;
    CHECK_OK(engine->Step(&progressed));
    CHECK_OK(engine->CheckIntegrity());
    Drain(engine.get(), &outputs, &needs);
    for (const Job& j : answered) {
      for (const auto& need : needs) {
        if (need.first == j.id) SetMask(engine.get(), j.id, need.second, j.prompt, outputs[need].tokens);
      }
      needs.erase(std::remove_if(needs.begin(), needs.end(), [&](const auto& need) { return need.first == j.id; }),
                  needs.end());
    }
    return progressed;
  };
  CHECK(step(guided));
  for (int i = 0; i < 4; ++i) step({});
  CHECK_EQ(needs.size(), 12u);  // all of them have a token, and wait for the mask of the next one
  Job plain = Simple(9, 6), second = Simple(5, 6);
  for (Job* j : {&plain, &second}) CHECK_OK(Submit(engine.get(), j));
  int steps = 0;
  for (; outputs[{plain.id, 0}].terminal == 0 && steps < 50; ++steps) CHECK(step({}));
  CHECK(steps <= 7);  // prompts, and a token a step
  for (const Job* j : {&plain, &second}) {
    while (outputs[{j->id, 0}].terminal == 0) CHECK(step({}));
    Compare(outputs[{j->id, 0}], Reference(*j, 0, 64));
  }
  CHECK(!step({}));
  CHECK_EQ(engine->Wait(0), 0u);
  const Needs asked = needs;
  for (const auto& need : asked) {
    const Job& j = guided[need.first - guided[0].id];
    SetMask(engine.get(), j.id, need.second, j.prompt, outputs[need].tokens);
  }
  needs.clear();
  while (engine->Wait(0) & LLMC_READY_WORK) step(guided);
  for (const Job& j : guided) {
    for (uint32_t i = 0; i < 4; ++i) Compare(outputs[{j.id, i}], Reference(j, i, 64));
  }
}

// More have their masks than there are seats: a plain request that runs beside them goes on every second step.
void TestSeatsAreShared() {
  EngineOptions options;
  options.max_num_seqs = 2;
  auto engine = Make(Usual(), 129, options);
  Job guided = Simple(6, 30), plain = Simple(9, 12), other = Simple(7, 12);
  guided.guided = true;
  guided.params.n = 2;
  guided.params.temperature = 1;
  CHECK_OK(Submit(engine.get(), &guided));
  Outputs outputs;
  Needs needs;
  for (int i = 0; i < 3; ++i) {
    bool progressed;
    if (i == 1) {
      for (uint32_t k = 0; k < 2; ++k) SetMask(engine.get(), guided.id, k, guided.prompt, {});
    }
    CHECK_OK(engine->Step(&progressed));
    Drain(engine.get(), &outputs, &needs);
  }
  for (Job* j : {&plain, &other}) CHECK_OK(Submit(engine.get(), j));
  int late = 0;
  size_t before = 0;
  for (int steps = 0; outputs[{plain.id, 0}].terminal == 0 && steps < 60; ++steps) {
    bool progressed;
    CHECK_OK(engine->Step(&progressed));
    CHECK_OK(engine->CheckIntegrity());
    Drain(engine.get(), &outputs, &needs);
    const size_t tokens = outputs[{plain.id, 0}].tokens.size();
    late = tokens > before ? 0 : late + 1;
    CHECK(late <= 2);
    before = tokens;
    for (const auto& need : needs) SetMask(engine.get(), guided.id, need.second, guided.prompt, outputs[need].tokens);
    needs.clear();
  }
  Compare(outputs[{plain.id, 0}], Reference(plain, 0, 64));
  CHECK((outputs[{guided.id, 0}].tokens.size()) > 4);  // they had their turns, too
}

// Three times as many requests as seats, whose masks come some steps late: none takes another's place, which would have
// to be computed again.
void TestLateMasks() {
  EngineOptions options;
  options.max_num_seqs = 4;
  for (const size_t late : {0, 1, 3, 5}) {
    auto engine = Make(Usual(), 257, options);
    std::vector<Job> jobs(12, Simple(40, 12));
    for (Job& j : jobs) {
      j.guided = true;
      CHECK_OK(Submit(engine.get(), &j));
    }
    Outputs outputs;
    std::deque<Needs> asked;
    const auto ended = [&](const Job& j) { return outputs[{j.id, 0}].terminal != 0; };
    for (int steps = 0; !std::all_of(jobs.begin(), jobs.end(), ended); ++steps) {
      CHECK(steps < 1000);
      bool progressed;
      CHECK_OK(engine->Step(&progressed));
      CHECK_OK(engine->CheckIntegrity());
      asked.emplace_back();
      Drain(engine.get(), &outputs, &asked.back());
      if (asked.size() <= late) continue;
      for (const auto& need : asked.front()) {
        const Job& j = jobs[need.first - jobs[0].id];
        SetMask(engine.get(), j.id, need.second, j.prompt, outputs[need].tokens);
      }
      asked.pop_front();
    }
    CHECK_EQ(engine->Stats().num_preemptions, 0u);
    for (const Job& j : jobs) Compare(outputs[{j.id, 0}], Reference(j, 0, 64));
  }
}

// Masks come from another thread, each a little later than the one before: sequences still share their steps. A mask that
// never comes holds up nobody for long.
void TestMasksAboutToCome() {
  NullDevice* device;
  auto engine = Make(Usual(), 129, {}, &device);
  // So long that the masks come in time on a busy machine, too.
  device->on_run = [] { std::this_thread::sleep_for(std::chrono::milliseconds(100)); };
  std::vector<Job> jobs(4, Simple(6, 12));
  for (Job& j : jobs) {
    j.guided = true;
    CHECK_OK(Submit(engine.get(), &j));
  }
  const Job& never = jobs[3];
  Outputs outputs;
  Needs needs;
  std::thread host;
  const auto ended = [&](const Job& j) { return &j == &never || outputs[{j.id, 0}].terminal != 0; };
  while (!std::all_of(jobs.begin(), jobs.end(), ended)) {
    Drain(engine.get(), &outputs, &needs);
    if (!needs.empty()) {
      if (host.joinable()) host.join();
      host = std::thread([&engine, &jobs, needs, outputs]() mutable {
        for (const auto& need : needs) {
          const Job& j = jobs[need.first - jobs[0].id];
          if (&j == &jobs[3] && outputs[need].tokens.size() == 2) continue;
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
          SetMask(engine.get(), j.id, need.second, j.prompt, outputs[need].tokens);
        }
      });
      needs.clear();
    }
    engine->Wait(UINT64_MAX);
    bool progressed;
    CHECK_OK(engine->Step(&progressed));
    CHECK_OK(engine->CheckIntegrity());
  }
  host.join();
  for (const Job& j : jobs) {
    if (&j != &never) Compare(outputs[{j.id, 0}], Reference(j, 0, 64));
  }
  const llmc_engine_stats stats = engine->Stats();
  // Without waits, sequences take turns, in twice as many steps.
  CHECK(stats.num_steps < 20);
  CHECK(stats.mask_wait_ns > 0);
}

// Memory is short: who waits for a mask gives it, though it came first; it begins again when its mask is there.
void TestParkedGivesMemory() {
  auto engine = Make(Usual(), 13, {});
  Job guided = Simple(24, 20), plain = Simple(16, 30);
  guided.guided = true;
  CHECK_OK(Submit(engine.get(), &guided));
  Outputs outputs;
  Needs needs;
  bool progressed;
  SetMask(engine.get(), guided.id, 0, guided.prompt, {});
  CHECK_OK(engine->Step(&progressed));
  CHECK_OK(engine->Step(&progressed));
  CHECK_OK(Submit(engine.get(), &plain));
  for (bool more = true; more;) {
    CHECK_OK(engine->Step(&more));
    CHECK_OK(engine->CheckIntegrity());
    Drain(engine.get(), &outputs, &needs);
  }
  Compare(outputs[{plain.id, 0}], Reference(plain, 0, 48));
  CHECK_EQ(engine->Stats().num_preemptions, 1u);
  CHECK(outputs[{guided.id, 0}].terminal == 0);
  while (outputs[{guided.id, 0}].terminal == 0) {
    SetMask(engine.get(), guided.id, 0, guided.prompt, outputs[{guided.id, 0}].tokens);
    CHECK_OK(engine->Step(&progressed));
    CHECK(progressed);
    Drain(engine.get(), &outputs, &needs);
  }
  Compare(outputs[{guided.id, 0}], Reference(guided, 0, 48));
}

// First masks are asked for in the order of service, for a bounded number of continuations that have not started.
void TestMasksAreAskedForInTurn() {
  EngineOptions options;
  options.max_num_seqs = 2;
  auto engine = Make(Usual(), 129, options);
  std::vector<Job> jobs(40, Simple(1, 2));
  Outputs outputs;
  Needs needs;
  for (Job& j : jobs) {
    j.guided = true;
    j.params.n = 32;
    CHECK_OK(Submit(engine.get(), &j));
  }
  Drain(engine.get(), &outputs, &needs);
  CHECK_EQ(needs.size(), 512u);
  CHECK_EQ(needs.back().first, jobs[15].id);
  CHECK_OK(engine->Cancel(jobs[3].id));
  CHECK_OK(engine->Cancel(jobs[20].id));
  Job urgent = Simple(1, 2);
  urgent.guided = true;
  urgent.priority = -1;
  CHECK_OK(Submit(engine.get(), &urgent));
  bool progressed;
  CHECK_OK(engine->Step(&progressed));
  CHECK_OK(engine->CheckIntegrity());
  needs.erase(needs.begin(), needs.begin() + 512);
  Drain(engine.get(), &outputs, &needs);
  CHECK_EQ(needs.size(), 33u);
  CHECK_EQ(needs.front().first, urgent.id);
  CHECK_EQ(needs.back().first, jobs[16].id);
}

void TestMaskErrors() {
  auto engine = Make(Usual(), 65, {});
  const uint32_t none[2] = {0, 0xffe00000u}, all[2] = {~0u, ~0u}, eos[2] = {1u << kEos, 0};
  Job guided = Simple(4, 4), plain = Simple(4, 4), ends = Simple(4, 4);
  guided.guided = ends.guided = true;
  guided.params.n = 2;
  CHECK_OK(Submit(engine.get(), &guided));
  CHECK_OK(Submit(engine.get(), &plain));
  CHECK_EQ(engine->SetTokenMasks(99, 0, all, 2).code, LLMC_ERR_NOT_FOUND);
  CHECK_EQ(engine->SetTokenMasks(plain.id, 0, all, 2).code, LLMC_ERR_INVALID_ARGUMENT);
  CHECK_EQ(engine->SetTokenMasks(guided.id, 2, all, 2).code, LLMC_ERR_INVALID_ARGUMENT);
  CHECK_EQ(engine->SetTokenMasks(guided.id, 0, all, 0).code, LLMC_ERR_INVALID_ARGUMENT);
  CHECK_EQ(engine->SetTokenMasks(guided.id, 0, all, 3).code, LLMC_ERR_INVALID_ARGUMENT);
  // Bits past the vocabulary allow nothing: the request fails, others go on.
  CHECK_OK(engine->SetTokenMasks(guided.id, 0, all, 2));
  CHECK_OK(engine->SetTokenMasks(guided.id, 1, none, 2));
  Outputs outputs;
  Needs needs;
  for (bool more = true; more;) {
    CHECK_OK(engine->Step(&more));
    Drain(engine.get(), &outputs, &needs);
  }
  for (uint32_t i = 0; i < 2; ++i) {
    CHECK_EQ((outputs[{guided.id, i}].kind), static_cast<uint32_t>(LLMC_EVENT_FAILED));
    CHECK_EQ((outputs[{guided.id, i}].error), LLMC_ERR_EMPTY_MASK);
    CHECK(Says(outputs[{guided.id, i}], "must allow eos"));
  }
  Compare(outputs[{plain.id, 0}], Reference(plain, 0, 64));
  CHECK_EQ(engine->SetTokenMasks(guided.id, 0, all, 2).code, LLMC_ERR_NOT_FOUND);
  // min_tokens gives way where only eos is left; a mask shorter than the vocabulary allows nothing behind it.
  ends.params.min_tokens = 3;
  ends.params.ignore_eos = 0;
  CHECK_OK(Submit(engine.get(), &ends));
  CHECK_OK(engine->SetTokenMasks(ends.id, 0, eos, 1));
  for (bool more = true; more;) {
    CHECK_OK(engine->Step(&more));
    Drain(engine.get(), &outputs, &needs);
  }
  CHECK_EQ((outputs[{ends.id, 0}].reason), static_cast<uint32_t>(LLMC_FINISH_STOP));
  CHECK_EQ((outputs[{ends.id, 0}].stop), kEos);
  CHECK_EQ(engine->Stats().num_free_blocks, engine->Stats().num_blocks);
}

}  // namespace

int main() {
  TestGuided();
  TestParked();
  TestSeatsAreShared();
  TestLateMasks();
  TestMasksAboutToCome();
  TestParkedGivesMemory();
  TestMasksAreAskedForInTurn();
  TestMaskErrors();
  return Finish("guided_test");
}
