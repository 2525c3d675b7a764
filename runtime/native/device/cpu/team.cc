#include "device/cpu/team.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <optional>
#include <string>
#include <system_error>

#include "core/clock.h"
#include "device/cpu/cpu_pin.h"
#include "device/cpu/cpu_topology.h"

namespace llmc {
namespace {

constexpr uint32_t kMaxThreads = 1024;
constexpr uint64_t kLeastSpinFraction = 16;
// Gaps between jobs from which on a worker (kGapNs) or the caller (kLongGapNs) counts as idle.
constexpr uint64_t kGapNs = 50'000, kLongGapNs = 1'000'000;
TeamClock system_clock;  // has no state

uint32_t NumRounds(uint32_t num_threads) {
  uint32_t rounds = 0;
  while ((1u << rounds) < num_threads) ++rounds;
  return rounds;
}

// For counters with a single writer: avoids a locked instruction.
void Add(std::atomic<uint64_t>* counter, uint64_t amount) {
  counter->store(counter->load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
}

}  // namespace

Status Team::Create(const TeamOptions& options, std::unique_ptr<Team>* out) {
  CpuPlan plan = PlanCpus();
  const uint32_t num_threads =
      options.num_threads != 0 ? options.num_threads : std::min(plan.num_threads(), kMaxThreads);
  if (num_threads > kMaxThreads) {
    return Status::Error(LLMC_ERR_INVALID_ARGUMENT, "num_threads is " + std::to_string(num_threads) +
                                                        ", more than 1024; pass 0 to use every allowed CPU");
  }
  std::unique_ptr<Team> team(new Team);
  team->num_threads_ = num_threads;
  team->num_rounds_ = NumRounds(num_threads);
  team->size_ = team->kept_ = team->awake_ = num_threads;
  team->adapts_ = options.adapt && num_threads > 1 && (options.clock != nullptr || num_threads <= plan.num_running());
  team->clock_ = options.clock != nullptr ? options.clock : &system_clock;
  if (team->adapts_) {
    team->policy_.emplace(num_threads);
    team->late_ns_.resize(num_threads);
    team->restarts_ = true;
  }
  team->pinned_ = options.pin && num_threads > 1 && num_threads <= plan.cpus.size() && !plan.quota_binds();
  team->idle_spin_ns_ = uint64_t{options.idle_spin_us} * 1000;
  // If not all threads can run at once, the thread that is waited for may need this thread's CPU.
  team->barrier_spin_ns_ = num_threads > plan.num_running() ? 0 : uint64_t{options.barrier_spin_us} * 1000;
  team->cpus_ = std::move(plan.cpus);
  if (team->pinned_) team->cpus_.resize(num_threads);
  team->members_.reset(new Member[num_threads]);
  team->gates_.reset(new Gate[std::size_t{num_threads} * team->num_rounds_]);
  for (uint32_t i = 0; i < num_threads; ++i) team->members_[i].spin_ns = team->barrier_spin_ns_;

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
  const uint32_t number = job_gate_.value() + 1;
  job_gate_.Open(number);
  for (uint32_t i = 1; i < num_threads_; ++i) members_[i].recall.Open(number);
  for (std::thread& worker : workers_) worker.join();
}

void Team::Run(Job job, void* context) {
  Add(&jobs_, 1);
  if (num_threads_ == 1) return job(context, 0, 1);
  if (!adapts_) return RunJob(job, context);
  if (!caller_queued_ || !::pthread_equal(caller_, ::pthread_self())) {
    caller_ = ::pthread_self();
    caller_queued_.emplace();
    members_[0].queued_ns = clock_->QueuedNs(0, *caller_queued_);
  }
  const uint64_t start = clock_->NowNs();
  // Time in which the caller could not run between jobs is no delay of the team.
  if (start - ended_at_ns_ >= kLongGapNs) members_[0].queued_ns += start - ended_at_ns_;
  kept_ = size();
  judges_ = worked_ns_ + last_ns_ >= policy_->next_look_ns();
  RunJob(job, context);
  ended_at_ns_ = clock_->NowNs();
  Adapt(ended_at_ns_ - start);
}

void Team::RunJob(Job job, void* context) {
  const uint32_t size = this->size();
  if (pinned_ && size == num_threads_ && loose_.load(std::memory_order_relaxed) == 0) PlaceCaller();
  job_ = job;
  context_ = context;
  epoch_ = members_[0].epoch;
  Enter(0, caller_queued_ ? &*caller_queued_ : nullptr);
  if (size > 1) {
    const uint32_t number = job_gate_.value() + 1;
    for (uint32_t i = awake_; i < size; ++i) members_[i].recall.Open(number);
    job_gate_.Open(number);
  }
  job(context, 0, size);
  if (size > 1) Meet(0, true, nullptr);
  if (judges_) JudgeLateness(0, *caller_queued_);
  awake_ = kept_;
}

// Chooses the threads of the next job. Call between jobs.
void Team::Adapt(uint64_t ran_ns) {
  last_ns_ = ran_ns;
  worked_ns_ += ran_ns;
  restarts_ = false;
  if (judges_) {
    judges_ = false;
    for (uint32_t i = 0; i < size(); ++i) late_ns_[i] = members_[i].late_ns;
    policy_->Look(worked_ns_, late_ns_.data());
    if (policy_->size() < size()) Dismiss(policy_->size());
  }
  if (policy_->pause_over(worked_ns_)) Recall();
}

void Team::Recall() {
  if (size() == num_threads_) return;
  policy_->Recall(worked_ns_);
  restarts_ = true;
  size_.store(num_threads_, std::memory_order_relaxed);
}

// Workers wait for a job, so an empty job tells them. Those not kept sleep at gates of their own and read nothing of
// the team until these open. The caller waits only for threads that take part.
void Team::Dismiss(uint32_t kept) {
  Add(&cuts_, 1);
  kept_ = kept;
  RunJob([](void*, uint32_t, uint32_t) {}, nullptr);
  size_.store(kept, std::memory_order_relaxed);
}

void Team::Work(uint32_t thread) {
  ::pthread_setname_np(::pthread_self(), ("llmc-" + std::to_string(thread)).c_str());
  const QueuedTime queued;
  std::optional<CpuPin> pin;
  if (pinned_) pin.emplace(cpus_[thread], &queued, &loose_);
  Member& self = members_[thread];
  bool kept = true;
  for (uint32_t job = 0;;) {
    if (kept) {
      AwaitJob(thread, ++job, queued);
    } else {
      self.recall.Await(job + 1, 0);
      job = self.recall.value();
    }
    if (stop_) return;
    Enter(thread, &queued);
    kept = thread < kept_;
    job_(context_, thread, self.size);
    if (judges_) JudgeLateness(thread, queued);
    // The caller waits for all threads, so a worker need not: once it has told its partners, it looks for the next job.
    // State that the caller writes between jobs must not be read after this.
    Meet(thread, false, nullptr);
    if (pin && pin->Update()) Add(&self.unpins, 1);
  }
}

// Time that other processes take from a worker while it is idle is no delay.
void Team::AwaitJob(uint32_t thread, uint32_t job, const QueuedTime& queued) {
  Member& self = members_[thread];
  uint64_t spin_ns = idle_spin_ns_;
  if (adapts_) {
    const uint64_t gap_ns = std::min(kGapNs, spin_ns);
    if (job_gate_.Spin(job, gap_ns)) return;
    spin_ns -= gap_ns;
    self.queued_ns -= clock_->IdleQueuedNs(thread, queued);
  }
  if (job_gate_.Await(job, spin_ns).parked) Add(&self.job_parks, 1);
  if (adapts_) self.queued_ns += clock_->IdleQueuedNs(thread, queued);
}

void Team::Enter(uint32_t thread, const QueuedTime* queued) {
  Member& self = members_[thread];
  const uint32_t size = this->size();
  if (self.size != size) {
    self.size = size;
    self.num_rounds = NumRounds(size);
  }
  self.epoch = epoch_;
  if (restarts_ && queued != nullptr) self.queued_ns = clock_->QueuedNs(thread, *queued);
}

void Team::JudgeLateness(uint32_t thread, const QueuedTime& queued) {
  Member& self = members_[thread];
  const uint64_t now = clock_->QueuedNs(thread, queued);
  self.late_ns = now - std::min(now, self.queued_ns);
  self.queued_ns = now;
}

void Team::Meet(uint32_t thread, bool wait_last, ReadAhead* ahead) {
  Member& self = members_[thread];
  Add(&self.barriers, 1);
  if (!profiling_) return Exchange(thread, wait_last, ahead);
  const uint64_t start = MonotonicNs();
  Exchange(thread, wait_last, ahead);
  Add(&self.wait_ns, MonotonicNs() - start);
}

// A dissemination barrier: in round r a thread tells the thread 2^r further on and hears from the one 2^r before. After
// the last round it has heard, through others, from all. Within a job a gate has one writer, and no line is contended:
// two threads exchange one line each way, n threads take log2(n) rounds. Gates only grow, since a partner may be one
// epoch ahead.
// At the end of a job workers do not wait, so one may tell its partner only after the next job has begun. If that job
// runs on other threads, another thread tells the same partner. The end is therefore raised: a late worker must take
// nothing back. Within a job no thread is that late: one that was not told would not have gone on. A dismissed thread
// takes over the caller's epoch when it is back.
void Team::Exchange(uint32_t thread, bool wait_last, ReadAhead* ahead) {
  Member& self = members_[thread];
  const uint32_t epoch = ++self.epoch, size = self.size, num_rounds = self.num_rounds;
  for (uint32_t round = 0; round < num_rounds; ++round) {
    uint32_t to = thread + (1u << round);
    if (to >= size) to -= size;
    Gate& gate = gates_[std::size_t{to} * num_rounds_ + round];
    wait_last ? gate.Open(epoch) : gate.Raise(epoch);
    if (round + 1 == num_rounds && !wait_last) return;
    AwaitMember(&self, &gates_[std::size_t{thread} * num_rounds_ + round], epoch, ahead);
  }
}

// Waits are short, as kernels share work evenly, or last a time slice, if a thread lost its CPU to another process.
// Spinning pays for short ones only. The bound therefore halves with each long wait, which gives the CPU back early on
// a crowded machine, and doubles with each short one.
void Team::AwaitMember(Member* self, Gate* gate, uint32_t target, ReadAhead* ahead) {
  // With barrier_spin_ns_ 0 the CPU goes to others at once, so nothing is read ahead.
  while (ahead != nullptr && barrier_spin_ns_ != 0 && !gate->IsOpen(target) && ahead->Fetch()) {
  }
  const Waited waited = gate->Await(target, self->spin_ns);
  if (waited.parked) Add(&self->parks, 1);
  if (waited.ns > barrier_spin_ns_) {
    self->spin_ns = std::max(self->spin_ns / 2, barrier_spin_ns_ / kLeastSpinFraction);
  } else if (waited.ns > 0) {
    self->spin_ns = std::min(self->spin_ns * 2, barrier_spin_ns_);
  }
}

TeamThreadStats Team::ThreadStats(uint32_t thread) const {
  const Member& member = members_[thread];
  const auto get = [](const std::atomic<uint64_t>& counter) { return counter.load(std::memory_order_relaxed); };
  return {get(member.barriers), get(member.parks), get(member.job_parks), get(member.wait_ns), get(member.unpins)};
}

TeamStats Team::Stats() const {
  TeamStats stats;
  stats.jobs = jobs_.load(std::memory_order_relaxed);
  stats.loose = loose_.load(std::memory_order_relaxed);
  stats.size = size();
  stats.cuts = cuts_.load(std::memory_order_relaxed);
  for (uint32_t i = 0; i < num_threads_; ++i) {
    const TeamThreadStats thread = ThreadStats(i);
    stats.total.barriers += thread.barriers;
    stats.total.parks += thread.parks;
    stats.total.job_parks += thread.job_parks;
    stats.total.wait_ns += thread.wait_ns;
    stats.total.unpins += thread.unpins;
    stats.max_wait_ns = std::max(stats.max_wait_ns, thread.wait_ns);
  }
  return stats;
}

// The caller belongs to the application, so it is never left pinned. If it drifted off the CPU that workers leave free,
// it is moved there and gets its own affinity back.
void Team::PlaceCaller() const {
  if (::sched_getcpu() == cpus_[0]) return;
  CpuMask own;
  if (!GetAffinity(&own) || !Contains(own, cpus_[0])) return;
  if (SetAffinity(cpus_[0])) SetAffinity(own);
}

}  // namespace llmc
