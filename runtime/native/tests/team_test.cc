#include "team.h"

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "check.h"

namespace {

std::unique_ptr<llmc::Team> Make(uint32_t threads, bool pin, uint32_t idle_spin_us) {
  std::unique_ptr<llmc::Team> team;
  const llmc::Status status = llmc::Team::Create(threads, pin, idle_spin_us, &team);
  CHECK(status.ok());
  return team;
}

struct Shared {
  llmc::Team* team;
  std::vector<uint64_t> a, b;  // plain memory: the barrier alone orders it
  uint64_t steps;
};

// Every step each thread writes its slot from what all slots held: any lost barrier changes the result.
// No CHECK here: it counts without a lock.
void Mix(void* context, uint32_t thread, uint32_t) {
  Shared& s = *static_cast<Shared*>(context);
  for (uint64_t step = 0; step < s.steps; ++step) {
    const std::vector<uint64_t>& from = step % 2 ? s.b : s.a;
    std::vector<uint64_t>& to = step % 2 ? s.a : s.b;
    uint64_t sum = 0;
    for (uint64_t v : from) sum = sum * 31 + v;
    to[thread] = sum + thread;
    s.team->Barrier();
  }
}

void TestBarriers(uint32_t threads, bool pin, uint32_t idle_spin_us, uint64_t steps, int jobs) {
  auto team = Make(threads, pin, idle_spin_us);
  CHECK(team->num_threads() == threads);
  Shared s{team.get(), std::vector<uint64_t>(threads), std::vector<uint64_t>(threads), steps};
  std::iota(s.a.begin(), s.a.end(), 1);
  std::vector<uint64_t> a = s.a, b = s.b;
  for (int job = 0; job < jobs; ++job) {
    team->Run(Mix, &s);
    for (uint64_t step = 0; step < steps; ++step) {
      const auto& from = step % 2 ? b : a;
      auto& to = step % 2 ? a : b;
      uint64_t sum = 0;
      for (uint64_t v : from) sum = sum * 31 + v;
      for (uint32_t t = 0; t < threads; ++t) to[t] = sum + t;
    }
    CHECK(s.a == a && s.b == b);
  }
}

void TestEveryThreadRunsOnce() {
  auto team = Make(3, true, 0);
  struct Counts {
    std::atomic<int> runs[3] = {};
  } counts;
  for (int i = 1; i <= 200; ++i) {
    // With no idle spin the workers are asleep now and then.
    if (i % 20 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    team->Run([](void* c, uint32_t t, uint32_t) { static_cast<Counts*>(c)->runs[t].fetch_add(1); }, &counts);
    for (auto& runs : counts.runs) CHECK(runs.load() == i);
  }
}

void TestCallerKeepsAffinity() {
  cpu_set_t before, after;
  CHECK(sched_getaffinity(0, sizeof(before), &before) == 0);
  {
    auto team = Make(0, true, 100);
    CHECK(team->num_threads() == static_cast<uint32_t>(CPU_COUNT(&before)));
    for (int i = 0; i < 50; ++i) team->Run([](void*, uint32_t, uint32_t) {}, nullptr);
    CHECK(sched_getaffinity(0, sizeof(after), &after) == 0);
    CHECK(std::memcmp(&before, &after, sizeof(before)) == 0);
  }
  CHECK(sched_getaffinity(0, sizeof(after), &after) == 0);
  CHECK(std::memcmp(&before, &after, sizeof(before)) == 0);
}

void TestErrorsAndLifetime() {
  std::unique_ptr<llmc::Team> team;
  const llmc::Status status = llmc::Team::Create(5000, true, 0, &team);
  CHECK(status.code == LLMC_ERR_INVALID_ARGUMENT && !team);
  for (int i = 0; i < 50; ++i) Make(1 + i % 4, i % 2, i % 3 ? 0 : 200);
}

}  // namespace

int main() {
  TestBarriers(1, true, 1000, 100, 10);
  TestBarriers(2, true, 1000, 500, 20);
  TestBarriers(2, false, 0, 500, 20);
  TestBarriers(3, true, 50, 100, 10);   // more threads than CPUs on small machines: must still finish
  TestBarriers(16, true, 100, 50, 5);
  TestEveryThreadRunsOnce();
  TestCallerKeepsAffinity();
  TestErrorsAndLifetime();
  std::puts("team_test passed");
  return 0;
}
