#include "device/cpu/cpu_pin.h"

#include <algorithm>

#include "core/clock.h"

namespace llmc {

bool GetAffinity(CpuMask* mask) {
  *mask = {};
  return ::sched_getaffinity(0, sizeof(*mask), mask->data()) == 0;
}

bool SetAffinity(const CpuMask& mask) { return ::sched_setaffinity(0, sizeof(mask), mask.data()) == 0; }

bool SetAffinity(int cpu) {
  CpuMask mask{};
  CPU_SET_S(cpu, sizeof(mask), mask.data());
  return SetAffinity(mask);
}

bool Contains(const CpuMask& mask, int cpu) { return CPU_ISSET_S(cpu, sizeof(mask), mask.data()); }

bool PinPolicy::Look(uint64_t now_ns, uint64_t queued_ns) {
  if (now_ns < next_look_ns()) return pinned_;
  if (!pinned_) {
    pinned_ = true;
  } else if (queued_ns - queued_ns_ > (now_ns - since_ns_) / kQueuedShare) {
    pinned_ = false;
    pause_ns_ = next_pause_ns_;
    next_pause_ns_ = std::min(next_pause_ns_ * 2, kLongestPauseNs);
  } else {
    next_pause_ns_ = kFirstPauseNs;
  }
  since_ns_ = now_ns;
  queued_ns_ = queued_ns;
  return pinned_;
}

CpuPin::CpuPin(int cpu, const QueuedTime* queued, std::atomic<uint32_t>* loose)
    : cpu_(cpu),
      queued_(queued),
      loose_(loose),
      placed_(GetAffinity(&own_) && SetAffinity(cpu_)),
      policy_(MonotonicNs(), queued->Ns()) {}

bool CpuPin::Update() {
  if (!queued_->known() || !placed_) return false;
  const uint64_t now = MonotonicNs();
  if (now < policy_.next_look_ns()) return false;
  const bool before = policy_.pinned();
  const bool pinned = policy_.Look(now, queued_->Ns());
  if (pinned == before) return false;
  if (pinned) {
    SetAffinity(cpu_);
    loose_->fetch_sub(1, std::memory_order_relaxed);
  } else {
    SetAffinity(own_);
    loose_->fetch_add(1, std::memory_order_relaxed);
  }
  return !pinned;
}

}  // namespace llmc
