#include "device/cpu/team.h"

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "device/cpu/cpu_topology.h"
#include "support/check.h"

namespace {

constexpr uint32_t kNoSpin = 0, kShortSpin = 20, kLongSpin = 1000;

std::unique_ptr<llmc::Team> Make(uint32_t threads, bool pin, uint32_t idle_spin_us, uint32_t barrier_spin_us = 50) {
  llmc::TeamOptions options;
  options.num_threads = threads;
  options.pin = pin;
  options.idle_spin_us = idle_spin_us;
  options.barrier_spin_us = barrier_spin_us;
  std::unique_ptr<llmc::Team> team;
  CHECK_OK(llmc::Team::Create(options, &team));
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
    s.team->Barrier(thread);
  }
}

void TestBarriers(uint32_t threads, bool pin, uint32_t spin_us, uint64_t steps, int jobs) {
  auto team = Make(threads, pin, spin_us, spin_us);
  CHECK_EQ(team->num_threads(), threads);
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
    for (auto& runs : counts.runs) CHECK_EQ(runs.load(), i);
  }
}

// Each thread in turn comes late to a barrier, so each parks and each is the one that wakes.
struct Late {
  llmc::Team* team;
  std::vector<int> seen;  // plain memory
};
void ComeLate(void* context, uint32_t thread, uint32_t num_threads) {
  Late& late = *static_cast<Late*>(context);
  for (uint32_t last = 0; last < num_threads; ++last) {
    if (thread == last) {
      std::this_thread::sleep_for(std::chrono::milliseconds(3));
      late.seen.push_back(static_cast<int>(thread));
    }
    late.team->Barrier(thread);
  }
}

// Only who waits reads ahead, to the end and no further; the second place lies `stride` bytes on.
void TestReadAhead() {
  auto team = Make(2, false, kLongSpin, kLongSpin);
  struct Context {
    llmc::Team* team;
    std::vector<char> memory;
    const char* early = nullptr;
    const char* late = nullptr;
    std::atomic<bool> waits{false};
  } context{team.get(), std::vector<char>(4096 + 40), nullptr, nullptr, {}};
  team->Run(
      [](void* c, uint32_t thread, uint32_t) {
        Context& all = *static_cast<Context*>(c);
        const char* begin = all.memory.data();
        llmc::ReadAhead ahead{begin, begin + 2048 + 10, 2048};
        if (thread == 0) {
          all.waits = true;
        } else {
          while (!all.waits) std::this_thread::yield();
          std::this_thread::sleep_for(std::chrono::milliseconds(50));
        }
        all.team->Barrier(thread, &ahead);
        (thread == 0 ? all.early : all.late) = ahead.at;
      },
      &context);
  CHECK(context.early == context.memory.data() + 33 * 64);
  CHECK(context.late < context.early);
}

void TestParking(uint32_t threads, uint32_t barrier_spin_us) {
  auto team = Make(threads, false, 0, barrier_spin_us);
  Late late{team.get(), {}};
  const int jobs = 5;
  for (int job = 0; job < jobs; ++job) team->Run(ComeLate, &late);
  CHECK_EQ(late.seen.size(), std::size_t{threads} * jobs);
  for (std::size_t i = 0; i < late.seen.size(); ++i) CHECK_EQ(late.seen[i], static_cast<int>(i % threads));
  const llmc::TeamStats stats = team->Stats();
  CHECK(stats.total.parks > 0);
  CHECK(stats.total.job_parks > 0);
}

void TestStats() {
  const uint32_t threads = 3, jobs = 4, steps = 7;
  auto team = Make(threads, false, 100);
  Shared s{team.get(), std::vector<uint64_t>(threads), std::vector<uint64_t>(threads), steps};
  for (uint32_t i = 0; i < jobs; ++i) team->Run(Mix, &s);
  // Counts of the workers are complete once they have entered the last barrier, which the caller has waited for.
  llmc::TeamStats stats = team->Stats();
  CHECK_EQ(stats.jobs, jobs);
  CHECK_EQ(stats.total.barriers, threads * jobs * (steps + 1));
  CHECK_EQ(stats.total.wait_ns, 0u);
  for (uint32_t t = 0; t < threads; ++t) CHECK_EQ(team->ThreadStats(t).barriers, jobs * (steps + 1));
  CHECK_EQ(team->ThreadStats(0).job_parks, 0u);

  team->SetProfiling(true);
  Late late{team.get(), {}};
  team->Run(ComeLate, &late);
  stats = team->Stats();
  CHECK(stats.total.wait_ns >= 3000000u);  // thread 0 was late by at least this; the others waited for it
  CHECK(stats.max_wait_ns > 0 && stats.max_wait_ns <= stats.total.wait_ns);
  team->SetProfiling(false);
  const uint64_t before = team->ThreadStats(0).wait_ns;
  team->Run(ComeLate, &late);
  CHECK_EQ(team->ThreadStats(0).wait_ns, before);
}

void TestOneThread() {
  auto team = Make(1, true, 0);
  CHECK(!team->pinned());
  int runs = 0;
  struct Context {
    llmc::Team* team;
    int* runs;
  } context{team.get(), &runs};
  team->Run(
      [](void* c, uint32_t t, uint32_t n) {
        auto* context = static_cast<Context*>(c);
        context->team->Barrier(t);
        *context->runs += n == 1 ? 1 : 100;
      },
      &context);
  CHECK_EQ(runs, 1);
  CHECK_EQ(team->Stats().jobs, 1u);
}

void TestCallerKeepsAffinity() {
  cpu_set_t before, after;
  CHECK(sched_getaffinity(0, sizeof(before), &before) == 0);
  {
    auto team = Make(0, true, 100);
    CHECK_EQ(team->num_threads(), llmc::PlanCpus().num_threads());
    for (int i = 0; i < 50; ++i) team->Run([](void*, uint32_t, uint32_t) {}, nullptr);
    CHECK(sched_getaffinity(0, sizeof(after), &after) == 0);
    CHECK(std::memcmp(&before, &after, sizeof(before)) == 0);
  }
  CHECK(sched_getaffinity(0, sizeof(after), &after) == 0);
  CHECK(std::memcmp(&before, &after, sizeof(before)) == 0);
}

// Workers sit on the CPUs of the plan, in its order, or are left alone.
void TestPinning() {
  const llmc::CpuPlan plan = llmc::PlanCpus();
  const uint32_t threads = static_cast<uint32_t>(plan.cpus.size());
  struct Where {
    std::vector<int> count, first;
  } where{std::vector<int>(threads + 1), std::vector<int>(threads + 1, -1)};
  const llmc::Team::Job look = [](void* c, uint32_t thread, uint32_t) {
    cpu_set_t mask;
    if (sched_getaffinity(0, sizeof(mask), &mask) != 0) return;
    auto& out = *static_cast<Where*>(c);
    out.count[thread] = CPU_COUNT(&mask);
    for (int cpu = 0; cpu < CPU_SETSIZE && out.first[thread] < 0; ++cpu) {
      if (CPU_ISSET(cpu, &mask)) out.first[thread] = cpu;
    }
  };
  auto team = Make(threads, true, 0);
  CHECK_EQ(team->pinned(), threads > 1 && !plan.quota_binds());
  team->Run(look, &where);
  for (uint32_t t = 1; t < threads; ++t) {
    CHECK_EQ(where.count[t], team->pinned() ? 1 : static_cast<int>(threads));
    if (team->pinned()) CHECK_EQ(where.first[t], plan.cpus[t]);
  }
  CHECK(team->cpus() == plan.cpus);
  if (team->pinned()) CHECK(Make(2, true, 0)->cpus() == std::vector<int>(plan.cpus.begin(), plan.cpus.begin() + 2));
  CHECK(!Make(threads, false, 0)->pinned());
  CHECK(Make(2, false, 0)->cpus() == plan.cpus);
  team = Make(threads + 1, true, 0);
  CHECK(!team->pinned());
  team->Run(look, &where);
  for (uint32_t t = 1; t <= threads; ++t) CHECK_EQ(where.count[t], static_cast<int>(threads));
}

void TestErrorsAndLifetime() {
  llmc::TeamOptions options;
  options.num_threads = 5000;
  std::unique_ptr<llmc::Team> team;
  const llmc::Status status = llmc::Team::Create(options, &team);
  CHECK(status.code == LLMC_ERR_INVALID_ARGUMENT && !team);
  CHECK(status.message.find("5000") != std::string::npos);
  for (uint32_t i = 0; i < 50; ++i) Make(1 + i % 4, i % 2, i % 3 ? 0 : 200);
}

}  // namespace

int main() {
  TestBarriers(1, true, kLongSpin, 100, 10);
  TestBarriers(2, true, kLongSpin, 500, 20);
  TestBarriers(2, false, kNoSpin, 500, 20);
  TestBarriers(2, true, kShortSpin, 500, 20);
  // More threads than CPUs on small machines, and counts that are no power of two: must still finish.
  TestBarriers(3, true, kShortSpin, 100, 10);
  TestBarriers(5, false, kLongSpin, 100, 5);
  TestBarriers(7, false, kNoSpin, 50, 5);
  TestBarriers(16, true, kLongSpin, 50, 5);
  TestEveryThreadRunsOnce();
  TestReadAhead();
  TestParking(2, kNoSpin);
  TestParking(2, kShortSpin);
  TestParking(5, kShortSpin);
  TestStats();
  TestOneThread();
  TestCallerKeepsAffinity();
  TestPinning();
  TestErrorsAndLifetime();
  return llmc_test::Finish("team_test");
}
