// Keeps a thread on one CPU for as long as that does good: on a quiet machine it stops the scheduler from putting two
// threads of a team on one CPU; on a crowded one it would make the thread queue while other CPUs are free.
#pragma once
#include <sched.h>

#include <array>
#include <atomic>
#include <cstdint>

#include "device/cpu/queued_time.h"

namespace llmc {

constexpr int kMaxCpus = 8192;
// Of fixed size: a worker must not run out of memory.
using CpuMask = std::array<cpu_set_t, kMaxCpus / (8 * sizeof(cpu_set_t))>;
// Of the calling thread.
bool GetAffinity(CpuMask* mask);
bool SetAffinity(const CpuMask& mask);
bool SetAffinity(int cpu);
bool Contains(const CpuMask& mask, int cpu);

// The decision, from clocks alone. A pin that made its thread queue is given up, and tried again after a pause that
// doubles with each vain attempt.
class PinPolicy {
 public:
  static constexpr uint64_t kLookNs = 50'000'000;          // the shortest time that is judged
  static constexpr uint64_t kFirstPauseNs = 200'000'000;
  static constexpr uint64_t kLongestPauseNs = 12'800'000'000;
  static constexpr uint64_t kQueuedShare = 20;             // one part in 20 of the time is too much

  // queued_ns: how long the thread has been runnable without running, since it began.
  PinPolicy(uint64_t now_ns, uint64_t queued_ns) : since_ns_(now_ns), queued_ns_(queued_ns) {}
  bool pinned() const { return pinned_; }
  // When Look is worth a call.
  uint64_t next_look_ns() const { return since_ns_ + (pinned_ ? kLookNs : pause_ns_); }
  // Returns whether the thread should be pinned from now on.
  bool Look(uint64_t now_ns, uint64_t queued_ns);

 private:
  bool pinned_ = true;
  uint64_t pause_ns_ = 0;
  uint64_t next_pause_ns_ = kFirstPauseNs;
  uint64_t since_ns_;  // of the last look
  uint64_t queued_ns_;
};

// Pins the thread that constructs it, which alone may use it.
class CpuPin {
 public:
  // queued: of the same thread. loose: counts the pins that are given up at the moment.
  CpuPin(int cpu, const QueuedTime* queued, std::atomic<uint32_t>* loose);
  CpuPin(const CpuPin&) = delete;
  CpuPin& operator=(const CpuPin&) = delete;

  // Between jobs: gives the pin up or takes it back. Returns whether it was given up just now.
  bool Update();

 private:
  int cpu_;
  const QueuedTime* queued_;  // where the kernel does not tell, the pin stays
  std::atomic<uint32_t>* loose_;
  CpuMask own_;
  bool placed_;  // own_ is known and the thread was pinned
  PinPolicy policy_;
};

}  // namespace llmc
