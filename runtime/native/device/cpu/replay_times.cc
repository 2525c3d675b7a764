#include "device/cpu/replay_times.h"

namespace llmc {

// The replay's duration in ns calibrates its ticks. Parts are rounded down, so that they never exceed the whole.
void ReplayTimes::Account(const Spent& spent, uint32_t num_commands, uint64_t start, uint64_t end, uint64_t ns) {
  ns_per_tick_ = end > start ? static_cast<double>(ns) / static_cast<double>(end - start) : 0;
  const auto to_ns = [this](uint64_t ticks) {
    return static_cast<uint64_t>(static_cast<double>(ticks) * ns_per_tick_);
  };
  last_ = {};
  for (uint32_t family = 0; family < kNumFamilies; ++family) {
    const uint64_t family_ns = to_ns(spent.family[family]);
    stats_.family_ns[family] += family_ns;
    last_.kernel_ns += family_ns;
  }
  // The team meets at the end of the job, after the last command.
  last_.barrier_ns = to_ns(spent.barrier + (end - spent.done));
  stats_.num_replays += 1;
  stats_.total_ns += ns;
  stats_.kernel_ns += last_.kernel_ns;
  stats_.barrier_ns += last_.barrier_ns;
  num_profiled_ = profiling() ? num_commands : 0;
  start_ = start;
}

void ReplayTimes::SetProfiling(bool on) {
  // Threads write side by side: their rows are a cache line apart.
  stride_ = longest_ + 128 / sizeof(CommandTime) + 1;
  profile_ = std::vector<CommandTime>(on ? stride_ * num_threads_ : 0);
  num_profiled_ = 0;
}

CommandTime ReplayTimes::Profiled(uint32_t thread, uint32_t index) const {
  const CommandTime& ticks = profile_[thread * stride_ + index];
  const auto to_ns = [this](uint64_t at) {
    return at > start_ ? static_cast<uint64_t>(static_cast<double>(at - start_) * ns_per_tick_) : 0;
  };
  return {to_ns(ticks.start), to_ns(ticks.end), to_ns(ticks.leave)};
}

}  // namespace llmc
