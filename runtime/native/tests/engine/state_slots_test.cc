// Slots of states by themselves, and where an engine keeps states for later texts.
#include "engine/state_slots.h"

#include <random>
#include <set>

#include "support/engine_harness.h"

using namespace llmc_test;
using llmc::StateSlots;

namespace {

void TestOneAfterTheOther() {
  StateSlots slots(4, 9);
  const uint32_t own = slots.Take();
  CHECK(own != 0 && slots.num_free() == 2);
  // Promised is not kept: nobody finds it, and nobody takes it.
  const uint32_t promised = slots.Promise(5);
  CHECK(promised != 0 && promised != own && slots.Promise(5) == promised && slots.of(5) == 0);
  CHECK_EQ(slots.num_available(), 1u);
  slots.Keep(5, 5);
  CHECK(slots.of(5) == promised && slots.num_kept() == 1 && slots.num_available() == 2);
  slots.Keep(6, 6);  // has none
  CHECK_EQ(slots.num_kept(), 1u);
  const uint32_t other = slots.Promise(7);
  slots.Keep(7, 7);
  slots.Touch(5);
  // The least recently used one goes first, with its contents.
  CHECK(slots.Take() == other && slots.of(7) == 0 && slots.of(5) == promised);
  CHECK_OK(slots.CheckIntegrity({own, other}));
  CHECK(!slots.CheckIntegrity({own}).ok() && !slots.CheckIntegrity({own, own, other}).ok());
  CHECK(slots.Take() == promised && slots.of(5) == 0);
  CHECK(slots.Take() == 0 && slots.Promise(3) == 0);
  slots.GiveBack(own);
  CHECK_EQ(slots.Take(), own);
  slots.Clear();
  CHECK(slots.num_free() == 3 && slots.num_usable() == 3);
  CHECK_OK(slots.CheckIntegrity({}));
}

// Of two blocks with the same contents, lookups find one: it gets the slot, unless it has one.
void TestTheSameContents() {
  StateSlots slots(5, 9);
  const uint32_t slot = slots.Promise(2);
  slots.Keep(2, 3);
  CHECK(slots.of(2) == 0 && slots.of(3) == slot);
  CHECK(slots.Promise(4) != 0);
  slots.Keep(4, 3);
  CHECK(slots.of(3) == slot && slots.of(4) == 0 && slots.num_free() == 3);
  slots.Drop(3);
  CHECK(slots.of(3) == 0 && slots.num_free() == 4 && slots.num_kept() == 0);
}

void TestNone() {
  StateSlots slots(0, 9);
  CHECK(!slots.any() && slots.num_usable() == 0 && slots.num_available() == 0 && slots.of(3) == 0);
  slots.Drop(3);
  slots.Keep(3, 4);
  slots.Clear();
  CHECK_OK(slots.CheckIntegrity({}));
}

// Against a list of kept blocks in the order of their use.
void TestRandom() {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    const uint32_t num_slots = 2 + random() % 7, num_blocks = 2 + random() % 9;
    StateSlots slots(num_slots, num_blocks);
    std::vector<uint32_t> taken, kept;  // kept: blocks
    std::set<uint32_t> promised;        // blocks
    for (int step = 0; step < 200; ++step) {
      const uint32_t block = 1 + random() % (num_blocks - 1);
      const auto at = std::find(kept.begin(), kept.end(), block);
      const bool none = taken.size() + promised.size() + kept.size() == slots.num_usable();
      switch (random() % 6) {
        case 0: {
          const uint32_t oldest = none && !kept.empty() ? slots.of(kept.front()) : 0, slot = slots.Take();
          CHECK_EQ(slot != 0, !none || !kept.empty());
          if (none && !kept.empty()) {
            CHECK_EQ(slot, oldest);
            kept.erase(kept.begin());
          }
          if (slot != 0) taken.push_back(slot);
          break;
        }
        case 1:
          if (taken.empty()) break;
          slots.GiveBack(taken.back());
          taken.pop_back();
          break;
        case 2:
          if (at != kept.end() || promised.count(block) != 0) break;
          if (slots.Promise(block) == 0) {
            CHECK(none && kept.empty());
            break;
          }
          if (none) kept.erase(kept.begin());
          promised.insert(block);
          break;
        case 3: {
          const uint32_t to = 1 + random() % (num_blocks - 1);
          if (promised.count(block) == 0) break;
          const bool has = promised.count(to) != 0 || std::find(kept.begin(), kept.end(), to) != kept.end();
          slots.Keep(block, to);
          promised.erase(block);
          if (to == block || !has) kept.push_back(to);
          break;
        }
        case 4:
          slots.Touch(block);
          if (at != kept.end()) std::rotate(at, at + 1, kept.end());
          break;
        default:
          slots.Drop(block);
          if (at != kept.end()) kept.erase(at);
          promised.erase(block);
      }
      CHECK_OK(slots.CheckIntegrity(taken));
      CHECK_EQ(slots.num_kept(), kept.size());
      CHECK_EQ(slots.num_free(), slots.num_usable() - taken.size() - promised.size() - kept.size());
      for (uint32_t one = 1; one < num_blocks; ++one) {
        CHECK_EQ(slots.of(one) != 0, std::find(kept.begin(), kept.end(), one) != kept.end());
      }
    }
  }
}

ModelShape Recurrent() {
  ModelShape shape = Usual();
  shape.state_bytes = sizeof(NullDevice::State);
  return shape;
}

Job Text(std::vector<int32_t> prompt, uint32_t max_tokens = 1) {
  Job job = Simple(1, max_tokens);
  job.prompt = std::move(prompt);
  return job;
}

// Runs a job alone; returns how many tokens of its prompt were found.
uint32_t Cached(Engine* engine, Job job, Output* output = nullptr) {
  Outputs outputs;
  CHECK_OK(Submit(engine, &job));
  RunAll(engine, &outputs);
  Compare(outputs[{job.id, 0}], Reference(job, 0, 64));
  if (output != nullptr) *output = outputs[{job.id, 0}];
  return outputs[{job.id, 0}].num_cached;
}

std::vector<int32_t> Numbers(uint32_t count, int32_t first) {
  std::vector<int32_t> numbers;
  for (uint32_t i = 0; i < count; ++i) numbers.push_back((first + static_cast<int32_t>(i) * 5) % kVocab);
  return numbers;
}

std::vector<int32_t> Joined(std::vector<int32_t> one, const std::vector<int32_t>& other) {
  one.insert(one.end(), other.begin(), other.end());
  return one;
}

// The same prompt again computes what is behind its last whole block; so does one that goes on.
void TestPromptsAreFound() {
  auto engine = Make(Recurrent(), 65, {});
  for (const uint32_t length : {3u, 8u, 9u, 16u, 23u, 38u}) {
    const std::vector<int32_t> prompt = Numbers(length, static_cast<int32_t>(length));
    CHECK_EQ(Cached(engine.get(), Text(prompt)), 0u);
    CHECK_EQ(Cached(engine.get(), Text(prompt)), (length - 1) / 4 * 4);
    CHECK_EQ(Cached(engine.get(), Text(Joined(prompt, Numbers(7, 1)))), (length - 1) / 4 * 4);
  }
}

// Texts with the same beginning: the second one shows where they branch off, and the third goes on from there.
void TestBranches() {
  auto engine = Make(Recurrent(), 65, {});
  const std::vector<int32_t> system = Numbers(22, 9);
  CHECK_EQ(Cached(engine.get(), Text(Joined(system, Numbers(12, 30)))), 0u);
  CHECK_EQ(Cached(engine.get(), Text(Joined(system, Numbers(12, 31)))), 0u);
  CHECK_EQ(Cached(engine.get(), Text(Joined(system, Numbers(12, 32)))), 20u);
  CHECK_EQ(Cached(engine.get(), Text(Joined(system, Numbers(12, 30)))), 32u);
}

// A text computes blocks again that are cached, as no state is kept behind them. It then holds those, which other texts
// cannot evict while it runs, and not copies of its own.
void TestBlocksComputedAgainAreShared() {
  auto engine = Make(Recurrent(), 25, {});
  const std::vector<int32_t> system = Numbers(22, 9);
  CHECK_EQ(Cached(engine.get(), Text(Joined(system, Numbers(12, 30)))), 0u);
  const Job again = Text(Joined(system, Numbers(12, 31)));
  Job running = again;
  running.params.max_tokens = 24;
  CHECK_OK(Submit(engine.get(), &running));
  Outputs outputs;
  bool progressed;
  for (int i = 0; i < 4; ++i) CHECK_OK(engine->Step(&progressed));
  for (int32_t i = 0; i < 4; ++i) {  // these evict what no text holds
    Job other = Text(Numbers(33, i + 1));
    CHECK_OK(Submit(engine.get(), &other));
    CHECK_OK(engine->Step(&progressed));
    CHECK_OK(engine->CheckIntegrity());
  }
  RunAll(engine.get(), &outputs);
  Compare(outputs[{running.id, 0}], Reference(running, 0, 64));
  CHECK_EQ(Cached(engine.get(), again), 20u);
}

// A conversation goes on behind what was generated, from the last state that was kept of it.
void TestAnswersAreFound() {
  EngineOptions options;
  options.keep_states_every = 8;
  for (const bool late : {false, true}) {
    NullDevice::late = late;
    auto engine = Make(Recurrent(), 65, options);
    std::vector<int32_t> text = Numbers(10, 4);
    Output answer;
    CHECK_EQ(Cached(engine.get(), Text(text, 21), &answer), 0u);
    text = Joined(Joined(text, answer.tokens), Numbers(6, 2));
    CHECK_EQ(Cached(engine.get(), Text(text)), 24u);
  }
  NullDevice::late = false;
}

// One slot: one sequence runs after the other, none is lost, and none is found.
void TestFewSlots() {
  for (const uint32_t count : {1u, 2u, 3u}) {
    NullDevice::slots = count;
    auto engine = Make(Recurrent(), 65, {});
    std::vector<Job> jobs;
    for (uint32_t i = 0; i < 6; ++i) jobs.push_back(Text(Numbers(9 + i, static_cast<int32_t>(i)), 10));
    jobs[2].params.n = 3;
    for (Job& job : jobs) CHECK_OK(Submit(engine.get(), &job));
    Outputs outputs;
    Needs needs;
    uint32_t most = 0;
    for (bool more = true; more;) {
      CHECK_OK(engine->Step(&more));
      CHECK_OK(engine->CheckIntegrity());
      most = std::max(most, engine->Stats().num_running);
      Drain(engine.get(), &outputs, &needs);
    }
    CHECK_EQ(most, count);
    for (const Job& job : jobs) {
      for (uint32_t i = 0; i < job.params.n; ++i) Compare(outputs[{job.id, i}], Reference(job, i, 64));
    }
  }
  NullDevice::slots = 0;
}

void TestNoSlots() {
  class None : public NullDevice {
   public:
    using NullDevice::NullDevice;
    uint32_t num_states() const override { return 1; }
  };
  std::unique_ptr<Engine> engine;
  const Status status = Engine::Create(std::make_unique<None>(Recurrent(), 9), {}, &engine);
  CHECK(!status.ok() && status.message.find("no slot besides the dummy slot") != std::string::npos);
}

}  // namespace

int main() {
  TestOneAfterTheOther();
  TestTheSameContents();
  TestNone();
  TestRandom();
  TestPromptsAreFound();
  TestBranches();
  TestBlocksComputedAgainAreShared();
  TestAnswersAreFound();
  TestFewSlots();
  TestNoSlots();
  return Finish("state_slots_test");
}
