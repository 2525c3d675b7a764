#include "cpu_pin.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "clock.h"

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

CpuPin::CpuPin(int cpu, std::atomic<uint32_t>* loose)
    : cpu_(cpu),
      loose_(loose),
      placed_(GetAffinity(&own_) && SetAffinity(cpu_)),
      schedstat_(::open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC)),
      policy_(MonotonicNs(), QueuedNs()) {}

CpuPin::~CpuPin() {
  if (schedstat_ >= 0) ::close(schedstat_);
}

bool CpuPin::Update() {
  if (schedstat_ < 0 || !placed_) return false;
  const uint64_t now = MonotonicNs();
  if (now < policy_.next_look_ns()) return false;
  const bool before = policy_.pinned();
  const bool pinned = policy_.Look(now, QueuedNs());
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

// The second of the file's numbers.
uint64_t CpuPin::QueuedNs() const {
  char text[80];
  const ssize_t length = schedstat_ < 0 ? -1 : ::pread(schedstat_, text, sizeof(text) - 1, 0);
  if (length <= 0) return 0;
  text[length] = '\0';
  char* rest = text;
  std::strtoull(rest, &rest, 10);
  return std::strtoull(rest, nullptr, 10);
}

}  // namespace llmc
