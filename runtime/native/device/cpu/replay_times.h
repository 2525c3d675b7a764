// ReplayTimes: time of replays by part. Sums over all replays, the parts of the last one and, while profiling, the time
// of each command on each thread.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "device/device.h"
#include "device/replay_profile.h"

namespace llmc {

class ReplayTimes final : public ReplayProfile {
 public:
  // Parts of one replay's time on thread 0. done: end of its last command.
  struct Spent {
    std::array<uint64_t, kNumFamilies> family;
    uint64_t barrier, done;
  };

  explicit ReplayTimes(uint32_t num_threads) : num_threads_(num_threads) {}

  uint32_t num_threads() const override { return num_threads_; }
  const ReplayStats& stats() const override { return stats_; }
  void SetProfiling(bool on) override;
  uint32_t num_profiled() const override { return num_profiled_; }
  CommandTime Profiled(uint32_t thread, uint32_t index) const override;
  ReplayTime last() const { return last_; }

  bool profiling() const { return !profile_.empty(); }
  // Commands of the longest graph.
  void set_longest(std::size_t longest) { longest_ = longest; }
  // Where a thread writes its command times, in ticks; null while profiling is off.
  CommandTime* Commands(uint32_t thread) { return profile_.empty() ? nullptr : profile_.data() + thread * stride_; }
  // Records a replay of num_commands commands from start to end in ticks, which took `ns` nanoseconds.
  void Account(const Spent& spent, uint32_t num_commands, uint64_t start, uint64_t end, uint64_t ns);

 private:
  uint32_t num_threads_;
  std::size_t longest_ = 0;
  ReplayStats stats_;
  ReplayTime last_;
  std::vector<CommandTime> profile_;  // [thread][command]; empty while profiling is off
  std::size_t stride_ = 0;
  uint32_t num_profiled_ = 0;
  uint64_t start_ = 0;
  double ns_per_tick_ = 0;
};

}  // namespace llmc
