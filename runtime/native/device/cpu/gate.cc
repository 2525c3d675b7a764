#include "device/cpu/gate.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core/clock.h"
#include "core/pause.h"

namespace llmc {
namespace {

constexpr int kFirstPolls = 32;    // about a microsecond, in which most waits at a barrier end
constexpr int kPollsPerClock = 8;  // a clock read costs about as much as two polls

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "a futex is a plain 32-bit word");

}  // namespace

bool Gate::Spin(uint32_t target, uint64_t spin_ns) {
  if (IsOpen(target) || spin_ns == 0) return IsOpen(target);
  for (const uint64_t start = MonotonicNs(); MonotonicNs() - start < spin_ns;) {
    for (int i = 0; i < kPollsPerClock; ++i) {
      Pause();
      if (IsOpen(target)) return true;
    }
  }
  return false;
}

Waited Gate::AwaitSlowly(uint32_t target, uint64_t spin_ns) {
  if (spin_ns > 0) {
    for (int i = 0; i < kFirstPolls; ++i) {
      Pause();
      if (Reached(value(), target)) return {};
    }
  }
  const uint64_t start = MonotonicNs();
  for (uint64_t now = start; now - start < spin_ns; now = MonotonicNs()) {
    for (int i = 0; i < kPollsPerClock; ++i) {
      Pause();
      if (Reached(value(), target)) return {MonotonicNs() - start, false};
    }
  }
  Park(target);
  return {MonotonicNs() - start, true};
}

void Gate::Park(uint32_t target) {
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  for (uint32_t seen; !Reached(seen = value_.load(std::memory_order_seq_cst), target);) {
    // Returns at once if the value is no longer `seen`. After a signal or a late wake-up the loop looks again.
    ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value_), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
  }
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

void Gate::WakeAll() {
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value_), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

}  // namespace llmc
