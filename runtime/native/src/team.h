// Team: a persistent team of threads that runs one job at a time. The caller is thread 0.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "status.h"

namespace llmc {

class Team {
 public:
  using Job = void (*)(void* context, uint32_t thread, uint32_t num_threads);

  // num_threads 0: every CPU this process may use. Workers spin idle_spin_us for the next job before they sleep.
  // pin: worker i stays on the i-th allowed CPU; ignored when there are more threads than CPUs.
  static Status Create(uint32_t num_threads, bool pin, uint32_t idle_spin_us, std::unique_ptr<Team>* out);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  uint32_t num_threads() const { return num_threads_; }
  // Runs job on every thread and returns when all have finished. One caller at a time; job must not throw.
  void Run(Job job, void* context);
  // Inside a job, called by every thread: none continues before all have arrived.
  void Barrier();

 private:
  Team() = default;
  void Work(uint32_t thread);
  uint32_t WaitForJob(uint32_t seen);
  void PlaceCaller() const;

  static constexpr std::size_t kLine = 128;  // two lines: the prefetcher fetches pairs
  uint32_t num_threads_ = 1;
  uint32_t idle_spin_us_ = 0;
  uint32_t spins_before_yield_ = 0;
  bool pinned_ = false;
  std::vector<int> cpus_;  // allowed CPUs at creation
  std::vector<std::thread> workers_;

  // Written by the caller before a job is published.
  Job job_ = nullptr;
  void* context_ = nullptr;
  bool stop_ = false;

  alignas(kLine) std::atomic<uint32_t> generation_{0};  // counts jobs; sleepers wait on it
  alignas(kLine) std::atomic<uint32_t> sleepers_{0};
  alignas(kLine) std::atomic<uint32_t> arrived_{0};
  alignas(kLine) std::atomic<uint32_t> epoch_{0};  // counts completed barriers
  char padding_[kLine];
};

}  // namespace llmc
