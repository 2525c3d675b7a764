// Threads that submit, cancel, set masks, poll and read statistics while one steps; meant for the thread sanitizer.
#include <atomic>
#include <mutex>
#include <thread>

#include "core/clock.h"
#include "support/engine_harness.h"

using namespace llmc_test;

namespace {

constexpr int kSubmitters = 3, kJobs = 60;

void Stress() {
  EngineOptions options;
  options.speculate_tokens = 3;
  options.speculate_always = true;
  auto engine = Make(Usual(), 33, options);
  std::vector<std::vector<Job>> jobs(kSubmitters, std::vector<Job>(kJobs, Simple(9, 5)));
  std::map<uint64_t, Job> by_id;
  std::mutex mutex;  // guards by_id, outputs and needs
  Outputs outputs;
  Needs needs;
  std::atomic<int> submitting{kSubmitters};
  std::atomic<bool> done{false};

  std::vector<std::thread> threads;
  for (int t = 0; t < kSubmitters; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kJobs; ++i) {
        Job& j = jobs[t][i];
        j.prompt[0] = t;
        j.prompt[8] = i % kVocab;
        j.guided = i % 3 == 0;
        j.num_prompt_logprobs = i % 4 == 0 ? 2 : -1;
        j.params.n = i % 7 == 0 ? 3 : 1;
        j.priority = i % 2;
        if (i % 10 == 9) j.deadline_ns = MonotonicNs() + 200'000;
        {
          std::lock_guard<std::mutex> lock(mutex);  // a mask may be asked for before Submit returns
          CHECK_OK(Submit(engine.get(), &j));
          by_id[j.id] = j;
        }
        if (i % 5 == 0) (void)engine->Cancel(j.id);
        (void)engine->Stats();
        (void)engine->GraphStats();
        (void)engine->BucketMisses();
      }
      --submitting;
    });
  }
  threads.emplace_back([&] {
    while (!done) {
      if (!(engine->Wait(1'000'000) & LLMC_READY_WORK)) continue;
      bool progressed;
      CHECK_OK(engine->Step(&progressed));
    }
  });
  threads.emplace_back([&] {
    while (!done) {
      CHECK_OK(engine->CheckIntegrity());
      CHECK_OK(engine->WarmGraph(0, {}, nullptr));
      std::this_thread::yield();
    }
  });
  threads.emplace_back([&] {
    while (!done) {
      std::pair<uint64_t, uint32_t> need;
      std::vector<int32_t> prompt, tokens;
      {
        std::lock_guard<std::mutex> lock(mutex);
        if (needs.empty()) continue;
        need = needs.back();
        needs.pop_back();
        prompt = by_id[need.first].prompt;
        tokens = outputs[need].tokens;
      }
      SetMask(engine.get(), need.first, need.second, prompt, tokens);
    }
  });

  for (size_t ended = 0, expected = 1; ended < expected;) {
    (void)engine->Wait(1'000'000);
    std::lock_guard<std::mutex> lock(mutex);
    Drain(engine.get(), &outputs, &needs);
    ended = 0;
    for (const auto& [key, output] : outputs) ended += output.terminal == 1;
    expected = submitting > 0;
    for (const auto& [id, job] : by_id) expected += job.params.n;
  }
  done = true;
  for (auto& t : threads) t.join();
  CHECK_OK(engine->EnableGraph(0, true));  // a step may be on its way, for nobody
  CHECK_OK(engine->CheckIntegrity());
  CHECK_EQ(engine->Stats().num_free_blocks, engine->Stats().num_blocks);
  int compared = 0;
  for (const auto& [id, job] : by_id) {
    for (uint32_t i = 0; i < job.params.n; ++i) {
      const Output& got = outputs[{id, i}];
      if (got.reason == LLMC_FINISH_CANCELLED || got.reason == LLMC_FINISH_TIMEOUT) continue;
      Compare(got, Reference(job, i, 64));
      ++compared;
    }
  }
  CHECK(compared > kJobs);
}

}  // namespace

int main() {
  for (int i = 0; i < 6; ++i) {
    NullDevice::late = i % 2 != 0;
    Stress();
  }
  return Finish("engine_stress_test");
}
