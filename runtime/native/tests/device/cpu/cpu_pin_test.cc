// When a pin is given up and taken back, from made-up clocks.
#include "device/cpu/cpu_pin.h"

#include <atomic>
#include <cstdlib>
#include <new>
#include <thread>

#include "support/check.h"

namespace {

thread_local uint64_t num_allocations = 0;

}  // namespace

void* operator new(std::size_t bytes) {
  ++num_allocations;
  void* memory = std::malloc(bytes ? bytes : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace {

using llmc::PinPolicy;
constexpr uint64_t kLook = PinPolicy::kLookNs;

void TestAQuietMachineKeepsThePin() {
  PinPolicy policy(1000, 70);
  uint64_t now = 1000, queued = 70;
  for (int i = 0; i < 100; ++i) {
    now += kLook;
    queued += kLook / PinPolicy::kQueuedShare;
    CHECK(policy.Look(now, queued));
  }
}

void TestNothingIsJudgedTooEarly() {
  PinPolicy policy(0, 0);
  CHECK_EQ(policy.next_look_ns(), kLook);
  CHECK(policy.Look(kLook - 1, kLook));
  CHECK_EQ(policy.next_look_ns(), kLook);
  CHECK(!policy.Look(kLook, kLook));
}

// Each vain attempt is followed by twice the pause, up to a limit; a look that finds quiet starts over.
void TestPausesDouble() {
  PinPolicy policy(0, 0);
  uint64_t now = 0, queued = 0;
  uint64_t pause = PinPolicy::kFirstPauseNs;
  for (int i = 0; i < 12; ++i) {
    now += kLook;
    queued += kLook / 2;
    CHECK(!policy.Look(now, queued));
    CHECK_EQ(policy.next_look_ns(), now + pause);
    CHECK(!policy.Look(now + pause - 1, queued));
    now += pause;
    queued += pause;  // what was queued without a pin is no reason
    CHECK(policy.Look(now, queued));
    if (pause < PinPolicy::kLongestPauseNs) pause *= 2;
  }
  CHECK_EQ(pause, PinPolicy::kLongestPauseNs);
  now += kLook;
  CHECK(policy.Look(now, queued));
  now += kLook;
  CHECK(!policy.Look(now, queued + kLook));
  CHECK_EQ(policy.next_look_ns(), now + PinPolicy::kFirstPauseNs);
}

// A worker that runs out of memory could only terminate.
void TestAPinTakesNoMemory() {
  llmc::CpuMask own;
  CHECK(llmc::GetAffinity(&own));
  int cpu = 0;
  while (!llmc::Contains(own, cpu)) ++cpu;
  std::atomic<uint32_t> loose{0};
  uint64_t taken = 1;
  std::thread([&] {
    const uint64_t before = num_allocations;
    const llmc::QueuedTime queued;
    llmc::CpuPin pin(cpu, &queued, &loose);
    pin.Update();
    taken = num_allocations - before;
  }).join();
  CHECK_EQ(taken, 0u);
}

void TestThePinIsOfTheThread() {
  llmc::CpuMask before;
  CHECK(llmc::GetAffinity(&before));
  int cpu = 0;
  while (!llmc::Contains(before, cpu)) ++cpu;
  std::atomic<uint32_t> loose{0};
  bool pinned = false;
  std::thread([&] {
    const llmc::QueuedTime queued;
    llmc::CpuPin pin(cpu, &queued, &loose);
    llmc::CpuMask mask;
    pinned = llmc::GetAffinity(&mask) && CPU_COUNT_S(sizeof(mask), mask.data()) == 1 && llmc::Contains(mask, cpu);
  }).join();
  CHECK(pinned);
  llmc::CpuMask after;
  CHECK(llmc::GetAffinity(&after));
  CHECK(CPU_EQUAL_S(sizeof(before), before.data(), after.data()));
}

}  // namespace

int main() {
  TestAQuietMachineKeepsThePin();
  TestNothingIsJudgedTooEarly();
  TestPausesDouble();
  TestAPinTakesNoMemory();
  TestThePinIsOfTheThread();
  return llmc_test::Finish("cpu_pin_test");
}
