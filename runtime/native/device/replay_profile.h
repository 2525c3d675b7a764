// ReplayProfile: times of replays for tools: sums over all replays, and each command of the last one.
#pragma once
#include <array>
#include <cstdint>

#include "artifact/artifact.h"

namespace llmc {

// Sums over replays. Kernel and barrier times are those of thread 0; the rest of total_ns is overhead.
struct ReplayStats {
  uint64_t num_replays = 0;
  uint64_t total_ns = 0;
  uint64_t kernel_ns = 0;
  uint64_t barrier_ns = 0;
  std::array<uint64_t, kNumFamilies> family_ns{};
};

// One command on one thread: the kernel ran from start to end, then the thread waited until leave.
struct CommandTime {
  uint64_t start, end, leave;
};

class ReplayProfile {
 public:
  virtual ~ReplayProfile() = default;
  virtual uint32_t num_threads() const = 0;
  virtual const ReplayStats& stats() const = 0;
  // While on, every thread records the time of every command. Allocates; throws std::bad_alloc.
  virtual void SetProfiling(bool on) = 0;
  // Commands of the last replay, if it was profiled; else 0.
  virtual uint32_t num_profiled() const = 0;
  // Command `index` of the last replay on `thread`, in nanoseconds since the replay began.
  virtual CommandTime Profiled(uint32_t thread, uint32_t index) const = 0;
};

}  // namespace llmc
