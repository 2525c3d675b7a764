// Gate: a counter that threads advance and others wait for, first spinning, then asleep on a futex.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace llmc {

constexpr std::size_t kGateLine = 128;  // two cache lines: the prefetcher fetches pairs

// Cost of a wait. Zero if the gate opened within the first polls, which read no clock.
struct Waited {
  uint64_t ns = 0;
  bool parked = false;
};

class alignas(kGateLine) Gate {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }

  // Sets the value, which only grows (modulo 2^32), and wakes the sleeping threads; no system call if there are none.
  // Everything written before is visible to a thread that sees the value. One thread at a time.
  void Open(uint32_t value) {
    // Sequentially consistent here and in Park: either the sleeper sees the value, or this thread sees the sleeper.
    value_.store(value, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) != 0) WakeAll();
  }

  // As Open, but from any number of threads: the value never falls, even if one of them is late. With consecutive
  // values it also takes the cache line only once.
  void Raise(uint32_t value) {
    uint32_t seen = value - 1;
    do {
      if (value_.compare_exchange_weak(seen, value, std::memory_order_seq_cst, std::memory_order_relaxed)) {
        if (sleepers_.load(std::memory_order_seq_cst) != 0) WakeAll();
        return;
      }
    } while (!Reached(seen, value));
  }

  bool IsOpen(uint32_t target) const { return Reached(value(), target); }

  // Spins for at most spin_ns. Returns whether the value has reached `target`.
  bool Spin(uint32_t target, uint64_t spin_ns);

  // Waits until the value has reached `target`: spins for at most spin_ns, then sleeps.
  Waited Await(uint32_t target, uint64_t spin_ns) {
    if (Reached(value(), target)) return {};
    return AwaitSlowly(target, spin_ns);
  }

 private:
  // Waiters lag behind by far less than 2^31.
  static bool Reached(uint32_t value, uint32_t target) { return static_cast<int32_t>(value - target) >= 0; }
  Waited AwaitSlowly(uint32_t target, uint64_t spin_ns);
  void Park(uint32_t target);
  void WakeAll();

  std::atomic<uint32_t> value_{0};
  std::atomic<uint32_t> sleepers_{0};  // next to the value, because Open owns the cache line anyway
};

}  // namespace llmc
