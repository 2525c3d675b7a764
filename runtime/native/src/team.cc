#include "team.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <string>
#include <system_error>

namespace llmc {
namespace {

constexpr uint32_t kMaxThreads = 1024;
constexpr uint32_t kMaxCpus = 8192;

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

using CpuMask = std::vector<cpu_set_t>;
CpuMask EmptyMask() {
  CpuMask mask(kMaxCpus / (8 * sizeof(cpu_set_t)));
  CPU_ZERO_S(mask.size() * sizeof(cpu_set_t), mask.data());
  return mask;
}

bool GetAffinity(CpuMask* mask) {
  *mask = EmptyMask();
  return ::sched_getaffinity(0, mask->size() * sizeof(cpu_set_t), mask->data()) == 0;
}

bool SetAffinity(const CpuMask& mask) {
  return ::sched_setaffinity(0, mask.size() * sizeof(cpu_set_t), mask.data()) == 0;
}

bool PinTo(int cpu) {
  CpuMask mask = EmptyMask();
  CPU_SET_S(cpu, mask.size() * sizeof(cpu_set_t), mask.data());
  return SetAffinity(mask);
}

std::vector<int> AllowedCpus() {
  std::vector<int> cpus;
  CpuMask mask;
  if (GetAffinity(&mask)) {
    for (int cpu = 0; cpu < static_cast<int>(kMaxCpus); ++cpu) {
      if (CPU_ISSET_S(cpu, mask.size() * sizeof(cpu_set_t), mask.data())) cpus.push_back(cpu);
    }
  }
  return cpus;
}

void FutexWait(std::atomic<uint32_t>* word, uint32_t expected) {
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void FutexWakeAll(std::atomic<uint32_t>* word) {
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}
static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "a futex is a plain 32-bit word");

}  // namespace

Status Team::Create(uint32_t num_threads, bool pin, uint32_t idle_spin_us, std::unique_ptr<Team>* out) {
  std::unique_ptr<Team> team(new Team);
  team->cpus_ = AllowedCpus();
  const uint32_t num_cpus = team->cpus_.empty() ? std::max(1u, std::thread::hardware_concurrency())
                                                : static_cast<uint32_t>(team->cpus_.size());
  if (num_threads == 0) num_threads = std::min(num_cpus, kMaxThreads);
  if (num_threads > kMaxThreads) {
    return Status::Error(LLMC_ERR_INVALID_ARGUMENT, "num_threads is " + std::to_string(num_threads) +
                                                        ", more than 1024; pass 0 to use every allowed CPU");
  }
  team->num_threads_ = num_threads;
  team->idle_spin_us_ = idle_spin_us;
  team->pinned_ = pin && num_threads > 1 && num_threads <= team->cpus_.size();
  // With more threads than CPUs whoever is waited for may need this CPU: yield almost at once.
  team->spins_before_yield_ = num_threads > num_cpus ? 16 : 4096;

  // Signals belong to the application's threads.
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  Status status;
  try {
    team->workers_.reserve(num_threads - 1);
    for (uint32_t i = 1; i < num_threads; ++i) team->workers_.emplace_back(&Team::Work, team.get(), i);
  } catch (const std::system_error& error) {
    status = Status::Error(LLMC_ERR_OUT_OF_MEMORY, "cannot start thread " + std::to_string(team->workers_.size() + 1) +
                                                       " of " + std::to_string(num_threads) + ": " + error.what() +
                                                       "; ask for fewer threads");
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  LLMC_RETURN_IF_ERROR(status);
  *out = std::move(team);
  return Status::Ok();
}

Team::~Team() {
  stop_ = true;
  generation_.fetch_add(1);
  FutexWakeAll(&generation_);
  for (std::thread& worker : workers_) worker.join();
}

void Team::Run(Job job, void* context) {
  if (num_threads_ == 1) return job(context, 0, 1);
  if (pinned_) PlaceCaller();
  job_ = job;
  context_ = context;
  // Sequentially consistent on both sides: either a worker sees the new generation or this thread sees the sleeper.
  generation_.fetch_add(1);
  if (sleepers_.load() != 0) FutexWakeAll(&generation_);
  job(context, 0, num_threads_);
  Barrier();
}

void Team::Barrier() {
  if (num_threads_ == 1) return;
  // Nobody can complete this epoch before this thread arrives, so the value read here is the current one.
  const uint32_t epoch = epoch_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == num_threads_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    epoch_.store(epoch + 1, std::memory_order_release);
    return;
  }
  for (uint32_t spins = 0; epoch_.load(std::memory_order_acquire) == epoch; ++spins) {
    if (spins < spins_before_yield_) {
      Pause();
    } else {
      ::sched_yield();
    }
  }
}

uint32_t Team::WaitForJob(uint32_t seen) {
  using Clock = std::chrono::steady_clock;
  uint32_t now = generation_.load(std::memory_order_acquire);
  if (now != seen) return now;
  if (idle_spin_us_ > 0) {
    const auto deadline = Clock::now() + std::chrono::microseconds(idle_spin_us_);
    for (uint32_t spins = 0;; ++spins) {
      if ((now = generation_.load(std::memory_order_acquire)) != seen) return now;
      if (spins < spins_before_yield_) {
        Pause();
      } else {
        ::sched_yield();
      }
      if (spins % 64 == 63 && Clock::now() >= deadline) break;
    }
  }
  sleepers_.fetch_add(1);
  while ((now = generation_.load()) == seen) FutexWait(&generation_, seen);
  sleepers_.fetch_sub(1);
  return now;
}

void Team::Work(uint32_t thread) {
  ::pthread_setname_np(::pthread_self(), ("llmc-" + std::to_string(thread)).c_str());
  if (pinned_) PinTo(cpus_[thread]);
  for (uint32_t seen = 0;;) {
    seen = WaitForJob(seen);
    if (stop_) return;
    job_(context_, thread, num_threads_);
    Barrier();
  }
}

// The caller belongs to the application, so it is never left pinned: when it drifted off the CPU the workers leave
// free, it is moved there and gets its own affinity back.
void Team::PlaceCaller() const {
  if (::sched_getcpu() == cpus_[0]) return;
  CpuMask own;
  if (!GetAffinity(&own)) return;
  if (!CPU_ISSET_S(cpus_[0], own.size() * sizeof(cpu_set_t), own.data())) return;
  if (PinTo(cpus_[0])) SetAffinity(own);
}

}  // namespace llmc
