// Team: persistent threads that run one job at a time. The caller is thread 0.
#pragma once
#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "core/status.h"
#include "device/cpu/gate.h"
#include "device/cpu/queued_time.h"
#include "device/cpu/read_ahead.h"
#include "device/cpu/team_size.h"

namespace llmc {

// Clocks for an adapting team; tests provide their own.
class TeamClock {
 public:
  virtual ~TeamClock() = default;
  virtual uint64_t NowNs() { return MonotonicNs(); }
  // Time that the calling thread, number `thread`, has been runnable without running.
  virtual uint64_t QueuedNs(uint32_t thread, const QueuedTime& own) {
    static_cast<void>(thread);
    return own.Ns();
  }
  // The same while it waits for a job.
  virtual uint64_t IdleQueuedNs(uint32_t thread, const QueuedTime& own) { return QueuedNs(thread, own); }
};

struct TeamOptions {
  uint32_t num_threads = 0;       // 0: CpuPlan::num_threads of the caller's CPUs
  bool pin = true;  // worker i stays on the i-th CPU of the plan while that CPU is free; see Team::pinned
  uint32_t idle_spin_us = 1000;  // a worker spins this long for the next job before it sleeps; 0: sleeps at once
  // Longest spin of a thread at a barrier before it sleeps, because a sleeping thread wakes late; 0: sleeps at once.
  uint32_t barrier_spin_us = 1000;
  // Jobs run on fewer threads while other programs keep some off their CPUs; see TeamSizePolicy. With more threads than
  // CPUs, threads delay one another, which is no evidence of other load.
  bool adapt = false;
  TeamClock* clock = nullptr;  // must outlive the team; null: the system's
};

// Waits of a team's threads for one another. Counts start at Create and only grow.
struct TeamThreadStats {
  uint64_t barriers = 0;  // barriers passed, including the one at the end of each job
  uint64_t parks = 0;  // waits at barriers that ended asleep
  uint64_t job_parks = 0;  // waits for a job that ended asleep; 0 for the caller
  uint64_t wait_ns = 0;  // time at barriers, while profiling is on
  uint64_t unpins = 0;  // times that its pin was released because other programs kept its CPU busy
};

struct TeamStats {
  uint64_t jobs = 0;
  TeamThreadStats total;  // sums over the threads
  uint64_t max_wait_ns = 0;  // of the thread that waited longest
  uint32_t loose = 0;  // threads whose pin is currently released
  uint32_t size = 0;  // threads that currently work
  uint64_t cuts = 0;  // times that the number of working threads was reduced
};

class Team {
 public:
  using Job = void (*)(void* context, uint32_t thread, uint32_t num_threads);

  static Status Create(const TeamOptions& options, std::unique_ptr<Team>* out);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  uint32_t num_threads() const { return num_threads_; }
  // Threads of the next job, at most num_threads; in an adapting team it changes from job to job. They are those with
  // the lowest numbers.
  uint32_t size() const { return size_.load(std::memory_order_relaxed); }
  // False if pinning was not requested or would do harm. It does with a single thread, with more threads than CPUs, or
  // with a cgroup quota below the CPUs of the affinity mask.
  bool pinned() const { return pinned_; }
  // CPUs of its threads: if pinned one each, in thread order, else any of the affinity mask.
  const std::vector<int>& cpus() const { return cpus_; }
  // Runs job on `size` threads and returns when all have finished. One caller at a time; job must not throw.
  void Run(Job job, void* context);
  // Inside a job, called by every thread with its number: no thread continues before all have arrived. A waiting thread
  // reads ahead, if it has anything to read.
  void Barrier(uint32_t thread, ReadAhead* ahead = nullptr) {
    if (members_[thread].size > 1) Meet(thread, true, ahead);
  }

  // Call between jobs: the next one runs on all threads.
  void Recall();
  // Call between jobs.
  void SetProfiling(bool on) { profiling_ = on; }
  // From any thread; during a job the counts lag slightly.
  TeamStats Stats() const;
  TeamThreadStats ThreadStats(uint32_t thread) const;

 private:
  // Written only by its own thread, so that no cache line moves for a count.
  struct alignas(kGateLine) Member {
    uint32_t epoch = 0;  // barriers that this thread has entered
    uint32_t size = 1, num_rounds = 0;  // of the job it runs
    uint64_t spin_ns = 0;
    uint64_t queued_ns = 0;  // start of the time judged next
    uint64_t late_ns = 0;  // in the time judged last; the caller reads it after the barrier
    std::atomic<uint64_t> barriers{0}, parks{0}, job_parks{0}, wait_ns{0}, unpins{0};
    Gate recall;  // for a dismissed thread: the number of the job that it returns for
  };

  Team() = default;
  void Work(uint32_t thread);
  void AwaitJob(uint32_t thread, uint32_t job, const QueuedTime& queued);
  void Enter(uint32_t thread, const QueuedTime* queued);
  void JudgeLateness(uint32_t thread, const QueuedTime& queued);
  void RunJob(Job job, void* context);
  void Adapt(uint64_t ran_ns);
  void Dismiss(uint32_t kept);
  void Meet(uint32_t thread, bool wait_last, ReadAhead* ahead);
  void Exchange(uint32_t thread, bool wait_last, ReadAhead* ahead);
  void AwaitMember(Member* self, Gate* gate, uint32_t target, ReadAhead* ahead);
  void PlaceCaller() const;

  uint32_t num_threads_ = 1;
  uint32_t num_rounds_ = 0;  // of a job that runs on all threads
  uint64_t idle_spin_ns_ = 0;
  uint64_t barrier_spin_ns_ = 0;
  bool pinned_ = false;
  bool profiling_ = false;
  std::vector<int> cpus_;
  std::vector<std::thread> workers_;
  std::unique_ptr<Member[]> members_;  // [num_threads]
  std::unique_ptr<Gate[]> gates_;  // [num_threads][num_rounds]

  // Written by the caller before a job is published.
  Job job_ = nullptr;
  void* context_ = nullptr;
  bool stop_ = false;
  std::atomic<uint32_t> size_{1};
  uint32_t kept_ = 1;  // threads that wait for the job after this one; the others sleep until they are recalled
  uint32_t epoch_ = 0;  // at its start
  bool judges_ = false;  // when it ends, every thread reports how late it was
  bool restarts_ = false;  // when it starts, the time to be judged begins
  std::atomic<uint64_t> jobs_{0};

  // Owned by the caller; only in an adapting team.
  bool adapts_ = false;
  TeamClock* clock_ = nullptr;
  std::optional<TeamSizePolicy> policy_;
  std::vector<uint64_t> late_ns_;
  uint64_t worked_ns_ = 0, last_ns_ = 0;  // all jobs; the last job
  uint64_t ended_at_ns_ = 0;  // end of the last job
  uint32_t awake_ = 1;  // threads that wait for the next job; the others wait for their recall
  std::optional<QueuedTime> caller_queued_;
  pthread_t caller_{};
  std::atomic<uint64_t> cuts_{0};

  std::atomic<uint32_t> loose_{0};  // see CpuPin; changes a few times a second at most

  Gate job_gate_;  // counts jobs; on lines of its own
};

}  // namespace llmc
