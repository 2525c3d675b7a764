// When a team runs on fewer threads and when on all again, from made-up clocks: the policy, the team, the device.
#include "device/cpu/team_size.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <vector>

#include "device/cpu/cpu_device.h"
#include "device/cpu/team.h"
#include "support/check.h"
#include "support/hand_made_artifact.h"

namespace {

using namespace llmc_test;
using llmc::TeamSizePolicy;
constexpr uint64_t kLook = TeamSizePolicy::kLookNs;
constexpr uint64_t kFirstPause = kLook * TeamSizePolicy::kPausePerLook;

void TestBestSize() {
  using llmc::BestTeamSize;
  CHECK_EQ(BestTeamSize({0}), 1u);
  CHECK_EQ(BestTeamSize({1}), 1u);  // somebody has to do it
  CHECK_EQ(BestTeamSize({0, 0}), 2u);
  CHECK_EQ(BestTeamSize({0.3, 0}), 2u);  // 1.4 threads' worth
  CHECK_EQ(BestTeamSize({0.5, 0}), 1u);
  CHECK_EQ(BestTeamSize({1, 1}), 1u);
  CHECK_EQ(BestTeamSize({0.25, 0.25}), 2u);  // a quota of one and a half CPUs
  CHECK_EQ(BestTeamSize({0.5, 0.5, 0.5, 0.5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}), 12u);
  CHECK_EQ(BestTeamSize(std::vector<double>(64, 0.02)), 64u);  // small delays everywhere are no reason
}

// What a look finds that took `elapsed_ns`, thread i having been late for a part of it.
struct Watched {
  TeamSizePolicy policy;
  uint64_t worked_ns = 0;
  uint32_t Look(uint64_t elapsed_ns, const std::vector<double>& late) {
    worked_ns += elapsed_ns;
    std::vector<uint64_t> late_ns;
    for (const double part : late) late_ns.push_back(static_cast<uint64_t>(part * static_cast<double>(elapsed_ns)));
    policy.Look(worked_ns, late_ns.data());
    return policy.size();
  }
};

void TestNothingIsJudgedTooEarly() {
  Watched team{TeamSizePolicy(2)};
  CHECK_EQ(team.policy.next_look_ns(), kLook);
  CHECK_EQ(team.Look(kLook - 1, {0, 1}), 2u);
  CHECK_EQ(team.Look(1, {0, 1}), 2u);  // of both together it was late for 1 ns
  CHECK_EQ(team.Look(kLook, {0, 1}), 1u);
  CHECK_EQ(team.policy.next_look_ns(), UINT64_MAX);
}

// Each vain trial is followed by twice the pause, up to a limit; a trial that lasts as long as its pause starts over.
void TestPausesDouble() {
  Watched team{TeamSizePolicy(4)};
  uint64_t pause = kFirstPause;
  for (int i = 0; i < 8; ++i) {
    CHECK_EQ(team.Look(kLook, {0, 0.6, 0, 0}), 3u);
    team.worked_ns += pause - 1;
    CHECK(!team.policy.pause_over(team.worked_ns));
    team.worked_ns += 1;
    CHECK(team.policy.pause_over(team.worked_ns));
    team.policy.Recall(team.worked_ns);
    CHECK_EQ(team.policy.size(), 4u);
    pause = std::min(pause * 2, TeamSizePolicy::kLongestPauseNs);
  }
  CHECK_EQ(pause, TeamSizePolicy::kLongestPauseNs);
  for (uint64_t quiet = 0; quiet < pause; quiet += kLook) CHECK_EQ(team.Look(kLook, {0, 0, 0, 0}), 4u);
  CHECK_EQ(team.Look(kLook, {0, 0.6, 0, 0}), 3u);
  CHECK(team.policy.pause_over(team.worked_ns + kFirstPause));
}

// A trial may be one long job; while fewer work, more may be found late, and the pause ends when it would have.
void TestLongJobsAndFurtherCuts() {
  Watched team{TeamSizePolicy(4)};
  CHECK_EQ(team.Look(50 * kLook, {0.5, 0.5, 0, 0}), 2u);
  CHECK_EQ(team.Look(kLook, {0.7, 0}), 1u);
  team.worked_ns += 50 * kFirstPause - kLook - 1;
  CHECK(!team.policy.pause_over(team.worked_ns));
  CHECK(team.policy.pause_over(team.worked_ns + 1));
}

// Every job takes step_ns, during which a thread is late as long as it is told.
class FakeClock final : public llmc::TeamClock {
 public:
  static constexpr uint32_t kThreads = 8;
  explicit FakeClock(uint64_t step_ns) : step_ns_(step_ns) {}
  std::array<double, kThreads> late{};  // parts of each job

  // Asked at a job's start, and at its end.
  uint64_t NowNs() override {
    in_job_ = !in_job_;
    if (!in_job_) return now_ns_ += step_ns_;
    for (uint32_t i = 0; i < kThreads; ++i)
      queued_ns_[i] += static_cast<uint64_t>(late[i] * static_cast<double>(step_ns_));
    return now_ns_;
  }
  uint64_t IdleQueuedNs(uint32_t, const llmc::QueuedTime&) override { return 0; }
  // While a job runs, which no NowNs does.
  uint64_t QueuedNs(uint32_t thread, const llmc::QueuedTime&) override { return queued_ns_[thread]; }

 private:
  uint64_t step_ns_, now_ns_ = 0;
  bool in_job_ = false;
  std::array<uint64_t, kThreads> queued_ns_{};
};

llmc::TeamOptions Adapting(uint32_t threads, llmc::TeamClock* clock) {
  llmc::TeamOptions options;
  options.num_threads = threads;
  options.idle_spin_us = options.barrier_spin_us = 20;
  options.adapt = true;
  options.clock = clock;
  return options;
}

// A job that every thread of it takes part in, in steps that depend on one another, and no other thread.
class Jobs {
 public:
  Jobs(uint32_t threads, llmc::TeamClock* clock) { CHECK_OK(llmc::Team::Create(Adapting(threads, clock), &team_)); }
  llmc::Team& team() { return *team_; }

  // Returns how many threads it ran on.
  uint32_t Run() {
    const uint32_t size = team_->size();
    runs_ = {}, sums_ = {}, right_ = {};
    team_->Run([](void* self, uint32_t thread, uint32_t n) { static_cast<Jobs*>(self)->Work(thread, n); }, this);
    for (uint32_t i = 0; i < FakeClock::kThreads; ++i) {
      CHECK_EQ(runs_[i], i < size ? size : 0);
      CHECK_EQ(right_[i], i < size ? kSteps : 0);
    }
    return size;
  }
  // The size when `count` jobs have run.
  uint32_t After(int count) {
    for (int i = 0; i < count; ++i) Run();
    return team_->size();
  }

 private:
  static constexpr uint32_t kSteps = 5;
  void Work(uint32_t thread, uint32_t n) {
    runs_[thread] += n;
    for (uint32_t step = 1; step <= kSteps; ++step) {
      sums_[thread] = step;
      team_->Barrier(thread);
      right_[thread] += std::count(sums_.begin(), sums_.begin() + n, step) == n;
      team_->Barrier(thread);
    }
  }

  std::unique_ptr<llmc::Team> team_;
  std::array<uint32_t, FakeClock::kThreads> runs_{}, sums_{}, right_{};  // plain memory: the barrier alone orders it
};

void TestTeamAdapts() {
  FakeClock clock(kLook / 4);
  Jobs jobs(4, &clock);
  CHECK_EQ(jobs.After(50), 4u);
  clock.late = {0, 0, 0.6, 0.7};
  CHECK_EQ(jobs.After(8), 2u);
  const llmc::TeamStats stats = jobs.team().Stats();
  CHECK_EQ(stats.size, 2u);
  CHECK_EQ(stats.cuts, 1u);
  // The first trial finds one thread late still, the second none.
  clock.late = {0, 0, 0, 0.9};
  CHECK_EQ(jobs.After(60), 2u);
  CHECK_EQ(jobs.After(100), 3u);
  CHECK_EQ(jobs.team().Stats().cuts, 2u);
  clock.late = {};
  CHECK_EQ(jobs.After(200), 4u);
  CHECK_EQ(jobs.After(500), 4u);
  CHECK_EQ(jobs.team().Stats().cuts, 2u);
  clock.late = {0.9, 0.9, 0.9, 0.9};
  CHECK_EQ(jobs.After(9), 1u);
  jobs.team().Recall();
  CHECK_EQ(jobs.Run(), 4u);
  CHECK_EQ(jobs.After(8), 1u);
  CHECK_EQ(jobs.Run(), 1u);  // and ends so
}

// Sizes change as often as they can, so threads come and go while others are still leaving the last barrier.
void TestSizesThatChangeAllTheTime() {
  FakeClock clock(kLook);
  Jobs jobs(5, &clock);
  uint32_t random = 1, sizes = 0;
  for (int i = 0; i < 1500; ++i) {
    for (uint32_t thread = 0; thread < 5; ++thread) {
      random = random * 1664525u + 1013904223u;
      clock.late[thread] = random >> 29 < 2 ? 0.8 : 0;
    }
    sizes |= 1u << jobs.Run();
  }
  CHECK_EQ(sizes & 0b101110u, 0b101110u);  // 4, too, unless two were late
}

void TestATeamThatIsNotToAdaptDoesNot() {
  FakeClock clock(kLook);
  clock.late = {0.9, 0.9};
  llmc::TeamOptions options = Adapting(2, &clock);
  options.adapt = false;
  std::unique_ptr<llmc::Team> team;
  CHECK_OK(llmc::Team::Create(options, &team));
  for (int i = 0; i < 20; ++i) team->Run([](void*, uint32_t, uint32_t) {}, nullptr);
  CHECK_EQ(team->size(), 2u);
}

// Logits are the same on however many threads, whichever were there before, and weights still move.
void TestBitsStay() {
  FakeClock clock(kLook);
  MakeArtifact();
  std::shared_ptr<const llmc::Artifact> artifact;
  CHECK_OK(llmc::Artifact::Open(g_dir, &artifact));
  llmc::CpuDeviceOptions options;
  options.num_threads = 3;
  options.pool.blocks = 4;
  options.adapt = true;
  options.clock = &clock;
  std::unique_ptr<llmc::CpuDevice> device;
  CHECK_OK(llmc::CpuDevice::Create(artifact, options, &device));
  Batch b;
  uint32_t sizes = 0;
  for (int i = 0; i < 400; ++i) {
    // Other ids each time: a task that nobody does leaves logits of before.
    b.ids = {i % 3, i % 7, i % 8};
    if (i % 40 == 0) clock.late = i % 80 ? std::array<double, 8>{0, 0, 0.8} : std::array<double, 8>{0.8, 0, 0.8};
    CHECK_OK(device->BeforeStep());
    sizes |= 1u << device->team_use().size;
    const float* logits = nullptr;
    CHECK_OK(device->Replay({0, b.num_tokens, b.num_seqs, b.num_samples, b.stride, b.ids.data(), b.positions.data(),
                             b.slots.data(), b.tables.data(), b.context.data(), b.start.data(), b.sample.data()},
                            &logits));
    for (int v = 0; v < kVocab; ++v) {
      const float table = 0.5f * static_cast<float>(v);
      const auto twice = [&](int token) { return 2.0f * static_cast<float>(b.ids[static_cast<size_t>(token)]); };
      CHECK(logits[v] == 1000 + twice(1) + table && logits[kVocab + v] == 2100 + twice(2) + table);
    }
  }
  CHECK_EQ(sizes, 0b1110u);
  CHECK(device->team_use().cuts > 0);
  CHECK_EQ(device->num_host_threads(), 3u);
  RemoveArtifact();
}

}  // namespace

int main() {
  TestBestSize();
  TestNothingIsJudgedTooEarly();
  TestPausesDouble();
  TestLongJobsAndFurtherCuts();
  TestTeamAdapts();
  TestSizesThatChangeAllTheTime();
  TestATeamThatIsNotToAdaptDoesNot();
  TestBitsStay();
  return Finish("team_size_test");
}
