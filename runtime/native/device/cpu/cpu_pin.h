// Keeps a thread on one CPU while that helps. On a quiet machine pinning prevents two threads of a team from sharing a
// CPU. On a crowded one it would make the thread queue while other CPUs are free.
#pragma once
#include <sched.h>

#include <array>
#include <atomic>
#include <cstdint>

#include "device/cpu/queued_time.h"

namespace llmc {

constexpr int kMaxCpus = 8192;
// Fixed size: a worker must not run out of memory.
using CpuMask = std::array<cpu_set_t, kMaxCpus / (8 * sizeof(cpu_set_t))>;
// Affinity of the calling thread.
bool GetAffinity(CpuMask* mask);
bool SetAffinity(const CpuMask& mask);
bool SetAffinity(int cpu);
bool Contains(const CpuMask& mask, int cpu);

// Decides from clocks alone. A pin that made its thread queue is released and tried again after a pause, which doubles
// with each failed attempt.
class PinPolicy {
 public:
  static constexpr uint64_t kLookNs = 50'000'000;          // shortest time that is judged
  static constexpr uint64_t kFirstPauseNs = 200'000'000;
  static constexpr uint64_t kLongestPauseNs = 12'800'000'000;
  static constexpr uint64_t kQueuedShare = 20;             // queueing for more than 1/20 of the time is too much

  // queued_ns: time that the thread has been runnable without running since its start.
  PinPolicy(uint64_t now_ns, uint64_t queued_ns) : since_ns_(now_ns), queued_ns_(queued_ns) {}
  bool pinned() const { return pinned_; }
  // Time from which a call of Look is worthwhile.
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

// Pins the constructing thread; only that thread may use it.
class CpuPin {
 public:
  // queued: of the same thread. loose: counts currently released pins.
  CpuPin(int cpu, const QueuedTime* queued, std::atomic<uint32_t>* loose);
  CpuPin(const CpuPin&) = delete;
  CpuPin& operator=(const CpuPin&) = delete;

  // Releases or restores the pin; called between jobs. Returns whether it was released just now.
  bool Update();

 private:
  int cpu_;
  const QueuedTime* queued_;  // if the kernel does not report it, the pin stays
  std::atomic<uint32_t>* loose_;
  CpuMask own_;
  bool placed_;  // own_ is known and the thread was pinned
  PinPolicy policy_;
};

}  // namespace llmc
