#include "collective/shared_flag.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace llmc {

void SharedFlag::Set(uint32_t value) {
  // Sequentially consistent here and in Sleep: either the sleeper sees the value, or this thread sees the sleeper.
  value_.store(value, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value_), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

void SharedFlag::Sleep(uint32_t seen, uint64_t timeout_ns) {
  constexpr uint64_t kSecond = 1'000'000'000;
  const timespec timeout = {static_cast<time_t>(timeout_ns / kSecond), static_cast<long>(timeout_ns % kSecond)};
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  if (value_.load(std::memory_order_seq_cst) == seen) {
    ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value_), FUTEX_WAIT, seen, &timeout, nullptr, 0);
  }
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace llmc
