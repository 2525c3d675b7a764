#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <optional>
#include <string>
#include <system_error>

#include "clock.h"
#include "cpu_pin.h"
#include "cpu_topology.h"

namespace llmc {
namespace {

constexpr uint32_t kMaxThreads = 1024;
constexpr uint64_t kLeastSpinFraction = 16;

// For counters with a single writer: no locked instruction.
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
  while ((1u << team->num_rounds_) < num_threads) ++team->num_rounds_;
  team->pinned_ = options.pin && num_threads > 1 && num_threads <= plan.cpus.size() && !plan.quota_binds();
  team->idle_spin_ns_ = uint64_t{options.idle_spin_us} * 1000;
  // When not all threads can run at once, whoever is waited for needs this thread's CPU.
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
  job_gate_.Open(job_gate_.value() + 1);
  for (std::thread& worker : workers_) worker.join();
}

void Team::Run(Job job, void* context) {
  Add(&jobs_, 1);
  if (num_threads_ == 1) return job(context, 0, 1);
  if (pinned_ && loose_.load(std::memory_order_relaxed) == 0) PlaceCaller();
  job_ = job;
  context_ = context;
  job_gate_.Open(job_gate_.value() + 1);
  job(context, 0, num_threads_);
  Meet(0, true, nullptr);
}

void Team::Work(uint32_t thread) {
  ::pthread_setname_np(::pthread_self(), ("llmc-" + std::to_string(thread)).c_str());
  std::optional<CpuPin> pin;
  if (pinned_) pin.emplace(cpus_[thread], &loose_);
  Member& self = members_[thread];
  for (uint32_t job = 1;; ++job) {
    if (job_gate_.Await(job, idle_spin_ns_).parked) Add(&self.job_parks, 1);
    if (stop_) return;
    job_(context_, thread, num_threads_);
    // The caller waits for everyone, so a worker that has told its partners may look for the next job.
    Meet(thread, false, nullptr);
    if (pin && pin->Update()) Add(&self.unpins, 1);
  }
}

void Team::Meet(uint32_t thread, bool wait_last, ReadAhead* ahead) {
  Member& self = members_[thread];
  Add(&self.barriers, 1);
  if (!profiling_) return Exchange(thread, wait_last, ahead);
  const uint64_t start = MonotonicNs();
  Exchange(thread, wait_last, ahead);
  Add(&self.wait_ns, MonotonicNs() - start);
}

// A dissemination barrier: in round r a thread tells the one 2^r further on and hears from the one 2^r before, so
// after the last round it has heard, through others, from all. A gate has one writer, and no line is fought for: two
// threads meet in one transfer of a line each way, n threads in log2(n). A partner may be one epoch ahead: gates only
// grow.
void Team::Exchange(uint32_t thread, bool wait_last, ReadAhead* ahead) {
  Member& self = members_[thread];
  const uint32_t epoch = ++self.epoch;
  for (uint32_t round = 0; round < num_rounds_; ++round) {
    uint32_t to = thread + (1u << round);
    if (to >= num_threads_) to -= num_threads_;
    gates_[std::size_t{to} * num_rounds_ + round].Open(epoch);
    if (round + 1 == num_rounds_ && !wait_last) return;
    AwaitMember(&self, &gates_[std::size_t{thread} * num_rounds_ + round], epoch, ahead);
  }
}

// Waits are short (kernels share their work evenly) or, when some thread lost its CPU to another process, as long as
// a time slice. Spinning pays for the former only, so the bound halves with each wait that outlasts it, which hands
// the CPU back early on a crowded machine, and doubles with each that does not.
void Team::AwaitMember(Member* self, Gate* gate, uint32_t target, ReadAhead* ahead) {
  // Where the CPU is to go to others at once, nothing is read for longer.
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
  return {get(member.barriers), get(member.parks), get(member.job_parks), get(member.wait_ns),
          get(member.unpins)};
}

TeamStats Team::Stats() const {
  TeamStats stats;
  stats.jobs = jobs_.load(std::memory_order_relaxed);
  stats.loose = loose_.load(std::memory_order_relaxed);
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

// The caller belongs to the application, so it is never left pinned: when it drifted off the CPU the workers leave
// free, it is moved there and gets its own affinity back.
void Team::PlaceCaller() const {
  if (::sched_getcpu() == cpus_[0]) return;
  CpuMask own;
  if (!GetAffinity(&own) || !Contains(own, cpus_[0])) return;
  if (SetAffinity(cpus_[0])) SetAffinity(own);
}

}  // namespace llmc
