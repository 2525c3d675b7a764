// SharedFlag: a counter in memory shared by processes; one advances it, others wait for it.
#pragma once
#include <atomic>
#include <cstdint>

namespace llmc {

class alignas(128) SharedFlag {  // two cache lines: the prefetcher fetches pairs
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }
  // Modulo 2^32: waiters lag behind by far less than 2^31.
  bool Reached(uint32_t target) const { return static_cast<int32_t>(value() - target) >= 0; }
  // The value only grows. Everything written before is visible to a thread that sees the value. Makes no system call if
  // nobody sleeps.
  void Set(uint32_t value);
  // Sleeps until the value differs from `seen`, at most timeout_ns; may return early.
  void Sleep(uint32_t seen, uint64_t timeout_ns);

 private:
  std::atomic<uint32_t> value_{0};
  std::atomic<uint32_t> sleepers_{0};
};
static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "a futex is a plain 32-bit word");

}  // namespace llmc
