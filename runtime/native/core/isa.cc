#include "core/isa.h"

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

struct Leaf {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Leaf Cpuid(unsigned leaf, unsigned subleaf) {
  Leaf r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);  // zeros if there is no such leaf
  return r;
}

// Registers that the operating system saves, as bits of XCR0.
unsigned SavedRegisters() {
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

constexpr bool All(unsigned value, unsigned bits) { return (value & bits) == bits; }

// Bits of cpuid are those of Intel's manual, volume 2A. __builtin_cpu_supports would need a part of the compiler's
// runtime library that not every compiler has.
uint32_t DetectedIsaLevel() {
  constexpr unsigned kFma = 1u << 12, kMovbe = 1u << 22, kPopcnt = 1u << 23, kOsxsave = 1u << 27, kAvx = 1u << 28,
                     kF16c = 1u << 29;                                                     // leaf 1 ecx
  constexpr unsigned kBmi1 = 1u << 3, kAvx2 = 1u << 5, kBmi2 = 1u << 8;                    // leaf 7.0 ebx
  constexpr unsigned kAvx512 = 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31;       // F, DQ, CD, BW, VL
  constexpr unsigned kAvx512Vnni = 1u << 11;                                               // leaf 7.0 ecx
  constexpr unsigned kAmx = 1u << 22 | 1u << 24 | 1u << 25;  // leaf 7.0 edx: AMX-BF16, AMX-TILE, AMX-INT8
  constexpr unsigned kAvx512Bf16 = 1u << 5;                  // leaf 7.1 eax
  constexpr unsigned kLzcnt = 1u << 5;                       // leaf 0x80000001 ecx
  constexpr unsigned kYmm = 0x6, kZmm = 0xe0, kTiles = 0x60000;  // XCR0

  const Leaf basic = Cpuid(1, 0), extended = Cpuid(7, 0);
  if (!All(basic.ecx, kFma | kMovbe | kPopcnt | kOsxsave | kAvx | kF16c)) return 0;
  const unsigned saved = SavedRegisters();
  if (!All(saved, kYmm) || !All(extended.ebx, kBmi1 | kAvx2 | kBmi2)) return 0;
  if (!All(Cpuid(0x80000001, 0).ecx, kLzcnt)) return 0;
  if (!All(saved, kZmm) || !All(extended.ebx, kAvx512)) return 1;
  if (!All(extended.ecx, kAvx512Vnni)) return 2;
  if (!All(Cpuid(7, 1).eax, kAvx512Bf16)) return 3;
  return All(extended.edx, kAmx) && All(saved, kTiles) ? 5 : 4;
}

#else

uint32_t DetectedIsaLevel() { return 0; }

#endif

}  // namespace

uint32_t MachineIsaLevel() {
  static const uint32_t detected = DetectedIsaLevel();  // cpuid traps in a virtual machine: thousands of cycles
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
