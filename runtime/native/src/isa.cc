#include "isa.h"

#include <algorithm>
#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace llmc {

const char* IsaName(uint32_t level) {
  switch (level) {
    case 1: return "x86-64-v3";
    case 2: return "x86-64-v4";
    case 3: return "x86-64-v4 + AVX512-VNNI";
    case 4: return "x86-64-v4 + AVX512-VNNI + AVX512-BF16";
    case 5: return "x86-64-v4 + AVX512-VNNI + AVX512-BF16 + AMX";
    default: return "less than x86-64-v3";
  }
}

namespace {

std::atomic<uint32_t> limit{kMaxIsaLevel};

#if defined(__x86_64__)

// Of x86-64-v3, what older compilers' __builtin_cpu_supports does not know.
bool HasF16cMovbeLzcnt() {
  constexpr unsigned kMovbe = 1u << 22, kF16c = 1u << 29;  // leaf 1 ecx
  constexpr unsigned kLzcnt = 1u << 5;                     // leaf 0x80000001 ecx
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & kMovbe) || !(ecx & kF16c)) return false;
  return __get_cpuid(0x80000001, &eax, &ebx, &ecx, &edx) && (ecx & kLzcnt);
}

uint32_t DetectedIsaLevel() {
  // The avx checks of __builtin_cpu_supports include that the operating system saves the registers.
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("bmi") ||
      !__builtin_cpu_supports("bmi2") || !__builtin_cpu_supports("popcnt") || !HasF16cMovbeLzcnt()) {
    return 0;
  }
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512cd") || !__builtin_cpu_supports("avx512dq") ||
      !__builtin_cpu_supports("avx512vl")) {
    return 1;
  }
  if (!__builtin_cpu_supports("avx512vnni")) return 2;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kAvx512Bf16 = 1u << 5;                   // leaf 7.1 eax
  constexpr unsigned kAmx = 1u << 22 | 1u << 24 | 1u << 25;  // leaf 7.0 edx: AMX-BF16, AMX-TILE, AMX-INT8
  if (!__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) || !(eax & kAvx512Bf16)) return 3;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return 4;
  return (edx & kAmx) == kAmx ? 5 : 4;
}

#else

uint32_t DetectedIsaLevel() { return 0; }

#endif

}  // namespace

uint32_t MachineIsaLevel() {
  static const uint32_t detected = DetectedIsaLevel();  // cpuid leaves a virtual machine: thousands of cycles
  return std::min(detected, limit.load(std::memory_order_relaxed));
}

void LimitIsaLevel(uint32_t level) { limit.store(level, std::memory_order_relaxed); }

#if defined(__x86_64__)

bool EnableIsaLevel(uint32_t level) {
  if (level < 5) return true;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return ::syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

#else

bool EnableIsaLevel(uint32_t level) { return level == 0; }

#endif

}  // namespace llmc
