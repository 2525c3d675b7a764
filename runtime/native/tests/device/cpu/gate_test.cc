// Gate: who waits is let through, and one that several threads advance never falls.
#include "device/cpu/gate.h"

#include <atomic>
#include <thread>
#include <vector>

#include "support/check.h"

namespace {

// A thread that is late must not take back what another has opened since: somebody may be waiting for that.
void TestALateRaiseLowersNothing() {
  llmc::Gate gate;
  gate.Raise(1);
  CHECK_EQ(gate.value(), 1u);
  gate.Raise(7);  // with a gap
  CHECK_EQ(gate.value(), 7u);
  gate.Raise(6);
  CHECK_EQ(gate.value(), 7u);
  gate.Raise(7);
  CHECK_EQ(gate.value(), 7u);
  gate.Open(UINT32_MAX);
  gate.Raise(1);  // values wrap
  CHECK_EQ(gate.value(), 1u);
  gate.Raise(UINT32_MAX);
  CHECK_EQ(gate.value(), 1u);
}

// Threads raise one gate, each in its own steps, while others sleep at it for every value: whoever is late, all pass.
void TestSleepersOfAGateWithSeveralWriters() {
  constexpr uint32_t kLast = 3000, kWriters = 3;
  llmc::Gate gate;
  std::atomic<uint32_t> passed{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      for (uint32_t value = 1; value <= kLast; ++value) gate.Await(value, 0);
      ++passed;
    });
  }
  for (uint32_t writer = 0; writer < kWriters; ++writer) {
    threads.emplace_back([&gate, writer] {
      for (uint32_t value = 1 + writer; value <= kLast; value += kWriters) gate.Raise(value);
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(passed.load(), 2u);
  CHECK_EQ(gate.value(), kLast);
}

}  // namespace

int main() {
  TestALateRaiseLowersNothing();
  TestSleepersOfAGateWithSeveralWriters();
  return llmc_test::Finish("gate_test");
}
