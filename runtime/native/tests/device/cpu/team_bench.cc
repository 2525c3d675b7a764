// Prints what the team costs: ns for a barrier and for a job, for 1 … N threads, spinning and parked.
// Usage: team_bench [max_threads]. Not a test: figures depend on what else the machine is doing.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "device/cpu/cpu_topology.h"
#include "device/cpu/team.h"

namespace {

constexpr int kSamples = 400;
constexpr uint64_t kBarriersPerSample = 500;

struct Figures {
  double min, median, p90;
};

Figures Summarize(std::vector<double> ns) {
  std::sort(ns.begin(), ns.end());
  return {ns.front(), ns[ns.size() / 2], ns[ns.size() * 9 / 10]};
}

void Print(const char* what, uint32_t threads, const Figures& f) {
  std::printf("%-34s %3u threads  min %9.0f  median %9.0f  p90 %9.0f ns\n", what, threads, f.min, f.median, f.p90);
}

struct Context {
  llmc::Team* team;
  uint64_t barriers;
  uint64_t work;  // rounds of Work before each barrier
};

// A fixed amount of work, not of time: a thread that loses its CPU still has to do it.
void Work(uint64_t rounds) {
  uint64_t x = 88172645463325252ull;
  for (uint64_t i = 0; i < rounds; ++i) {
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
  }
  asm volatile("" ::"r"(x));
}

// Rounds of Work that take `ns` on a CPU of one's own.
uint64_t RoundsFor(uint64_t ns) {
  constexpr uint64_t kRounds = 20000;
  uint64_t best = UINT64_MAX;
  for (int i = 0; i < 200; ++i) {
    const uint64_t start = llmc::MonotonicNs();
    Work(kRounds);
    best = std::min(best, llmc::MonotonicNs() - start);
  }
  return kRounds * ns / std::max<uint64_t>(best, 1);
}

void Job(void* c, uint32_t thread, uint32_t) {
  const Context& context = *static_cast<Context*>(c);
  for (uint64_t i = 0; i < context.barriers; ++i) {
    Work(context.work);
    context.team->Barrier(thread);
  }
}

std::unique_ptr<llmc::Team> Make(uint32_t threads, uint32_t idle_spin_us) {
  llmc::TeamOptions options;
  options.num_threads = threads;
  options.idle_spin_us = idle_spin_us;
  std::unique_ptr<llmc::Team> team;
  const llmc::Status status = llmc::Team::Create(options, &team);
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.message.c_str());
    std::exit(1);
  }
  return team;
}

void BenchBarrier(uint32_t threads) {
  auto team = Make(threads, 1000);
  Context context{team.get(), kBarriersPerSample, 0};
  std::vector<double> ns;
  for (int i = 0; i < kSamples; ++i) {
    const uint64_t start = llmc::MonotonicNs();
    team->Run(Job, &context);
    ns.push_back(static_cast<double>(llmc::MonotonicNs() - start) / kBarriersPerSample);
  }
  Print("barrier", threads, Summarize(ns));
}

// A decode step in miniature: many short kernels that end in barriers. What is above their own time is waiting.
void BenchStep(uint32_t threads) {
  auto team = Make(threads, 1000);
  Context context{team.get(), 200, RoundsFor(50000)};
  std::vector<double> ns;
  for (int i = 0; i < 50; ++i) {
    const uint64_t start = llmc::MonotonicNs();
    team->Run(Job, &context);
    ns.push_back(static_cast<double>(llmc::MonotonicNs() - start));
  }
  Print("200 kernels of 50 us (10 ms)", threads, Summarize(ns));
  const llmc::TeamStats stats = team->Stats();
  std::printf("%-34s %llu of %llu waits parked, pins given up %llu times\n", "",
              static_cast<unsigned long long>(stats.total.parks), static_cast<unsigned long long>(stats.total.barriers),
              static_cast<unsigned long long>(stats.total.unpins));
}

// pause_us: what the caller does between jobs; longer than the idle spin, it finds its workers asleep.
void BenchJob(const char* what, uint32_t threads, uint32_t idle_spin_us, uint32_t pause_us) {
  auto team = Make(threads, idle_spin_us);
  Context context{team.get(), 0, 0};
  std::vector<double> ns;
  for (int i = 0; i < kSamples; ++i) {
    for (const uint64_t start = llmc::MonotonicNs(); llmc::MonotonicNs() - start < pause_us * 1000ull;) continue;
    const uint64_t start = llmc::MonotonicNs();
    team->Run(Job, &context);
    ns.push_back(static_cast<double>(llmc::MonotonicNs() - start));
  }
  Print(what, threads, Summarize(ns));
}

}  // namespace

int main(int argc, char** argv) {
  const llmc::CpuPlan plan = llmc::PlanCpus();
  const uint32_t cpus = plan.num_running();
  const uint32_t most = argc > 1 ? static_cast<uint32_t>(std::max(1, std::atoi(argv[1]))) : cpus;
  std::printf("%zu CPUs on %u cores, quota %u\n", plan.cpus.size(), plan.num_cores, plan.quota);
  for (uint32_t threads = 1; threads <= most; ++threads) {
    BenchBarrier(threads);
    BenchJob("job, workers spin", threads, 1000, 20);
    BenchJob("job, workers asleep", threads, 0, 200);
    BenchStep(threads);
  }
}
