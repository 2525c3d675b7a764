// Team: a persistent team of threads that runs one job at a time. The caller is thread 0.
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

// What a team that adapts goes by; tests have clocks of their own.
class TeamClock {
 public:
  virtual ~TeamClock() = default;
  virtual uint64_t NowNs() { return MonotonicNs(); }
  // Called by thread number `thread`: how long it has been runnable without running.
  virtual uint64_t QueuedNs(uint32_t thread, const QueuedTime& own) {
    static_cast<void>(thread);
    return own.Ns();
  }
  // The same, while it waits for a job.
  virtual uint64_t IdleQueuedNs(uint32_t thread, const QueuedTime& own) { return QueuedNs(thread, own); }
};

struct TeamOptions {
  uint32_t num_threads = 0;       // 0: CpuPlan::num_threads of the caller's CPUs
  bool pin = true;                // worker i stays on the i-th CPU of the plan while that is free; see Team::pinned
  uint32_t idle_spin_us = 1000;   // a worker spins this long for the next job before it sleeps; 0: sleeps at once
  // A thread spins at most this long at a barrier before it sleeps, for a sleeper wakes late; 0: sleeps at once.
  uint32_t barrier_spin_us = 1000;
  // Jobs run on fewer threads while other programs keep some from their CPUs; see TeamSizePolicy. More threads than
  // CPUs keep one another waiting, which tells nothing.
  bool adapt = false;
  TeamClock* clock = nullptr;  // must outlive the team; null: the system's
};

// What the threads of a team spent on waiting for one another. Counts start at Create and only grow.
struct TeamThreadStats {
  uint64_t barriers = 0;   // barriers passed, the one that ends each job included
  uint64_t parks = 0;      // waits at them that ended asleep
  uint64_t job_parks = 0;  // waits for a job that ended asleep; 0 for the caller
  uint64_t wait_ns = 0;    // time at barriers, while profiling is on
  uint64_t unpins = 0;     // times its CPU was so busy with other programs that the pin was given up
};

struct TeamStats {
  uint64_t jobs = 0;
  TeamThreadStats total;     // sums over the threads
  uint64_t max_wait_ns = 0;  // of the thread that waited longest
  uint32_t loose = 0;        // threads whose pin is given up now
  uint32_t size = 0;         // threads that work now
  uint64_t cuts = 0;         // times that fewer began to work
};

class Team {
 public:
  using Job = void (*)(void* context, uint32_t thread, uint32_t num_threads);

  static Status Create(const TeamOptions& options, std::unique_ptr<Team>* out);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  uint32_t num_threads() const { return num_threads_; }
  // Threads that the next job runs on, at most num_threads: of a team that adapts it changes from job to job. They are
  // those with the lowest numbers.
  uint32_t size() const { return size_.load(std::memory_order_relaxed); }
  // False when pinning was not asked for, or would do harm: for a single thread, for more threads than CPUs, and where
  // a cgroup quota grants less than the CPUs of the affinity mask.
  bool pinned() const { return pinned_; }
  // Where its threads run: when pinned one each, in their order, else any of the affinity mask.
  const std::vector<int>& cpus() const { return cpus_; }
  // Runs job on `size` threads and returns when all have finished. One caller at a time; job must not throw.
  void Run(Job job, void* context);
  // Inside a job, called by every thread with its number: none continues before all have arrived. A thread that waits
  // reads ahead, if there is what to.
  void Barrier(uint32_t thread, ReadAhead* ahead = nullptr) {
    if (members_[thread].size > 1) Meet(thread, true, ahead);
  }

  // Between jobs: the next one runs on all threads.
  void Recall();
  // Between jobs.
  void SetProfiling(bool on) { profiling_ = on; }
  // From any thread; during a job the counts are those of a moment ago.
  TeamStats Stats() const;
  TeamThreadStats ThreadStats(uint32_t thread) const;

 private:
  // Only its own thread writes it: no line travels for a count.
  struct alignas(kGateLine) Member {
    uint32_t epoch = 0;  // barriers that this thread has entered
    uint32_t size = 1, num_rounds = 0;  // of the job that it runs
    uint64_t spin_ns = 0;
    uint64_t queued_ns = 0;  // when the time that is judged next began
    uint64_t late_ns = 0;    // in the time that was judged last; the caller reads it behind the barrier
    std::atomic<uint64_t> barriers{0}, parks{0}, job_parks{0}, wait_ns{0}, unpins{0};
    Gate recall;  // for a thread that was dismissed: the number of the job that it is back for
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
  uint32_t num_rounds_ = 0;  // of a job on all threads
  uint64_t idle_spin_ns_ = 0;
  uint64_t barrier_spin_ns_ = 0;
  bool pinned_ = false;
  bool profiling_ = false;
  std::vector<int> cpus_;
  std::vector<std::thread> workers_;
  std::unique_ptr<Member[]> members_;  // [num_threads]
  std::unique_ptr<Gate[]> gates_;      // [num_threads][num_rounds]

  // Written by the caller before a job is published.
  Job job_ = nullptr;
  void* context_ = nullptr;
  bool stop_ = false;
  std::atomic<uint32_t> size_{1};
  uint32_t kept_ = 1;  // threads that wait for the job behind this one; the others go to sleep until they are recalled
  uint32_t epoch_ = 0;  // at its start
  bool judges_ = false;  // at its end every thread says how late it was
  bool restarts_ = false;  // at its start the time to be judged begins
  std::atomic<uint64_t> jobs_{0};

  // The caller's, of a team that adapts.
  bool adapts_ = false;
  TeamClock* clock_ = nullptr;
  std::optional<TeamSizePolicy> policy_;
  std::vector<uint64_t> late_ns_;
  uint64_t worked_ns_ = 0, last_ns_ = 0;  // all jobs; the last one
  uint64_t ended_at_ns_ = 0;  // the last one
  uint32_t awake_ = 1;  // threads that wait for the next job, the others for their recall
  std::optional<QueuedTime> caller_queued_;
  pthread_t caller_{};
  std::atomic<uint64_t> cuts_{0};

  std::atomic<uint32_t> loose_{0};  // see CpuPin; changes a few times a second at most

  Gate job_gate_;  // counts jobs; on lines of its own
};

}  // namespace llmc
