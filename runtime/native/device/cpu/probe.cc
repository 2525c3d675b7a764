#include "device/cpu/probe.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "core/clock.h"
#include "core/isa.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace llmc {
namespace {

constexpr uint64_t kReadBlock = 1 << 20;  // bytes read between two looks at the clock
constexpr uint32_t kRounds = 4096;        // rounds of an arithmetic probe between two looks at the clock
// Streams of a thread: several keep the prefetchers of several pages busy.
constexpr uint64_t kStreams = 8;
constexpr uint64_t kStreamBytes = kReadBlock / kStreams;
constexpr uint64_t kLine = 64;

// Makes the compiler believe that the value is used and may have changed.
template <class T>
inline void Keep(T* value) {
  asm volatile("" : "+m"(*value));
}

double ReadPlain(const char* data) {
  uint64_t sum = 0;
  for (uint64_t at = 0; at < kReadBlock; at += sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, data + at, sizeof(word));
    sum |= word;
  }
  Keep(&sum);
  return kReadBlock;
}

double F32Plain(const char*) {
  constexpr int kChains = 32;
  float chains[kChains];
  for (int i = 0; i < kChains; ++i) chains[i] = static_cast<float>(i);
  for (uint32_t round = 0; round < kRounds; ++round) {
    for (int i = 0; i < kChains; ++i) chains[i] = chains[i] * 0.5f + 1.0f;
    Keep(&chains[0]);
  }
  Keep(&chains);
  return 2.0 * kChains * kRounds;
}

#if defined(__x86_64__)

// The accumulators are independent and more than latency × ports; unrolled, each has a register of its own. The asm
// hides from the compiler that they are equal, or it would compute one for all.
#define LLMC_PROBE(type, chains, set, step)                                 \
  type acc[chains];                                                         \
  _Pragma("GCC unroll 16") for (int i = 0; i < (chains); ++i) acc[i] = set; \
  for (uint32_t round = 0; round < kRounds; ++round) {                      \
    _Pragma("GCC unroll 16") for (int i = 0; i < (chains); ++i) {           \
      acc[i] = step;                                                        \
      asm volatile("" : "+v"(acc[i]));                                      \
    }                                                                       \
  }                                                                         \
  _Pragma("GCC unroll 16") for (int i = 0; i < (chains); ++i) asm volatile("" : : "v"(acc[i]))

__attribute__((target("avx2"))) double ReadAvx2(const char* data) {
  __m256i acc[kStreams];
  for (auto& a : acc) a = _mm256_setzero_si256();
  for (uint64_t at = 0; at < kStreamBytes; at += kLine) {
#pragma GCC unroll 8
    for (uint64_t s = 0; s < kStreams; ++s) {
      const char* from = data + s * kStreamBytes + at;
      _mm_prefetch(from + 16 * kLine, _MM_HINT_T0);
      acc[s] = _mm256_or_si256(acc[s], _mm256_load_si256(reinterpret_cast<const __m256i*>(from)));
      acc[s] = _mm256_or_si256(acc[s], _mm256_load_si256(reinterpret_cast<const __m256i*>(from + kLine / 2)));
    }
  }
  for (auto& a : acc) Keep(&a);
  return kReadBlock;
}

__attribute__((target("avx512f"))) double ReadAvx512(const char* data) {
  __m512i acc[kStreams];
  for (auto& a : acc) a = _mm512_setzero_si512();
  for (uint64_t at = 0; at < kStreamBytes; at += 4 * kLine) {
#pragma GCC unroll 8
    for (uint64_t s = 0; s < kStreams; ++s) {
      const char* from = data + s * kStreamBytes + at;
#pragma GCC unroll 4
      for (uint64_t i = 0; i < 4; ++i) _mm_prefetch(from + (16 + i) * kLine, _MM_HINT_T0);
#pragma GCC unroll 4
      for (uint64_t i = 0; i < 4; ++i) acc[s] = _mm512_or_si512(acc[s], _mm512_load_si512(from + i * kLine));
    }
  }
  for (auto& a : acc) Keep(&a);
  return kReadBlock;
}

__attribute__((target("avx2,fma"))) double F32Avx2(const char*) {
  const __m256 x = _mm256_set1_ps(0.5f);
  const __m256 y = _mm256_set1_ps(1.0f);
  LLMC_PROBE(__m256, 12, y, _mm256_fmadd_ps(acc[i], x, y));
  return 2.0 * 8 * 12 * kRounds;
}

__attribute__((target("avx512f"))) double F32Avx512(const char*) {
  const __m512 x = _mm512_set1_ps(0.5f);
  const __m512 y = _mm512_set1_ps(1.0f);
  LLMC_PROBE(__m512, 16, y, _mm512_fmadd_ps(acc[i], x, y));
  return 2.0 * 16 * 16 * kRounds;
}

__attribute__((target("avx512f,avx512bw,avx512bf16"))) double Bf16Avx512(const char*) {
  const __m512i x = _mm512_set1_epi16(0x3f00);  // 0.5
  const __m512 zero = _mm512_setzero_ps();
  LLMC_PROBE(__m512, 16, zero, _mm512_dpbf16_ps(acc[i], reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(x)));
  return 2.0 * 32 * 16 * kRounds;
}

__attribute__((target("avx512f,avx512bw,avx512vnni"))) double Int8Avx512(const char*) {
  const __m512i x = _mm512_set1_epi8(1);
  const __m512i zero = _mm512_setzero_si512();
  LLMC_PROBE(__m512i, 16, zero, _mm512_dpbusd_epi32(acc[i], x, x));
  return 2.0 * 64 * 16 * kRounds;
}

#undef LLMC_PROBE

// Eight tile registers of 16 rows of 64 bytes, as kernels use them: four of sums, two of each factor. The asm is there
// because intrinsics do not say what memory they read.
#define LLMC_PROBE_TILES(factor, step)                         \
  struct alignas(64) {                                         \
    uint8_t palette = 1, start_row = 0, reserved[14] = {};     \
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64}; \
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};       \
  } config;                                                    \
  alignas(64) decltype(factor) tile[1024 / sizeof(factor)];    \
  std::fill(std::begin(tile), std::end(tile), factor);         \
  asm volatile("" : : "r"(&config), "r"(tile) : "memory");     \
  _tile_loadconfig(&config);                                   \
  _tile_loadd(4, tile, 64);                                    \
  _tile_loadd(5, tile, 64);                                    \
  _tile_loadd(6, tile, 64);                                    \
  _tile_loadd(7, tile, 64);                                    \
  for (uint32_t round = 0; round < kRounds; ++round) {         \
    step(0, 4, 6);                                             \
    step(1, 4, 7);                                             \
    step(2, 5, 6);                                             \
    step(3, 5, 7);                                             \
  }                                                            \
  _tile_release();                                             \
  const uint64_t depth = 64 / sizeof(factor);  /* of a row */  \
  return 2.0 * 16 * 16 * depth * 4 * kRounds

__attribute__((target("amx-tile,amx-bf16"))) double Bf16Amx(const char*) {
  LLMC_PROBE_TILES(uint16_t{0x3f00}, _tile_dpbf16ps);  // 0.5
}

__attribute__((target("amx-tile,amx-int8"))) double Int8Amx(const char*) { LLMC_PROBE_TILES(uint8_t{1}, _tile_dpbusd); }

#undef LLMC_PROBE_TILES
#endif

// The widest implementation that this machine runs, or nullptr.
Probe::Work Choose(Limit limit) {
  [[maybe_unused]] uint32_t level = MachineIsaLevel();
  while (level > 0 && !EnableIsaLevel(level)) --level;  // the system may refuse tile registers
#if defined(__x86_64__)
  switch (limit) {
    case Limit::kRead: return level >= 2 ? ReadAvx512 : level == 1 ? ReadAvx2 : ReadPlain;
    case Limit::kF32: return level >= 2 ? F32Avx512 : level == 1 ? F32Avx2 : F32Plain;
    case Limit::kBf16: return level >= 5 ? Bf16Amx : level >= 4 ? Bf16Avx512 : nullptr;
    case Limit::kInt8: return level >= 5 ? Int8Amx : level >= 3 ? Int8Avx512 : nullptr;
  }
  return nullptr;
#else
  return limit == Limit::kRead ? ReadPlain : limit == Limit::kF32 ? F32Plain : nullptr;
#endif
}

constexpr uint64_t kSlot = 128;  // two cache lines: threads do not share what they write

}  // namespace

Status Probe::Create(uint32_t num_threads, uint64_t read_bytes, bool pin, std::unique_ptr<Probe>* out) {
  std::unique_ptr<Probe> probe(new Probe);
  TeamOptions team;
  team.num_threads = num_threads;
  team.pin = pin;
  team.idle_spin_us = 0;  // leave the CPUs to what runs between two measurements
  LLMC_RETURN_IF_ERROR(Team::Create(team, &probe->team_));
  const uint64_t threads = probe->num_threads();
  if (read_bytes < threads * kReadBlock || read_bytes > (1ull << 40)) {
    return Status::Error(LLMC_ERR_INVALID_ARGUMENT, "read_bytes is " + std::to_string(read_bytes) +
                                                        "; use at least 1 MiB a thread, at most 1 TiB");
  }
  probe->stride_ = read_bytes / threads / kReadBlock * kReadBlock;
  LLMC_RETURN_IF_ERROR(Pages::Allocate(probe->stride_ * threads, "memory to read", &probe->memory_));
  LLMC_RETURN_IF_ERROR(Pages::Allocate(kSlot * threads, "counters", &probe->done_));
  // Pages never written would all be the one zero page, which fits the cache.
  std::memset(probe->memory_.data(), 1, probe->memory_.size());
  *out = std::move(probe);
  return Status::Ok();
}

Status Probe::Measure(Limit limit, double seconds, double* rate) {
  if (!(seconds > 0 && seconds <= 60)) {
    return Status::Error(LLMC_ERR_INVALID_ARGUMENT,
                         "seconds is " + std::to_string(seconds) + "; use more than 0 and at most 60");
  }
  work_ = Choose(limit);
  if (!work_) {
    return Status::Error(LLMC_ERR_UNSUPPORTED_TARGET,
                         limit == Limit::kBf16 ? "this CPU has no bf16 dot product (AVX512-BF16) to measure"
                                               : "this CPU has no int8 dot product (AVX512-VNNI) to measure");
  }
  const uint64_t start = MonotonicNs();
  deadline_ns_ = start + static_cast<uint64_t>(seconds * 1e9);
  team_->Run([](void* self, uint32_t t, uint32_t n) { static_cast<Probe*>(self)->Run(t, n); }, this);
  const double elapsed = static_cast<double>(MonotonicNs() - start) * 1e-9;
  double total = 0;
  for (uint32_t t = 0; t < num_threads(); ++t) {
    double part;
    std::memcpy(&part, done_.data() + t * kSlot, sizeof(part));
    total += part;
  }
  *rate = total / elapsed;
  return Status::Ok();
}

// Each thread works until the deadline and waits for no other: a thread that is held up costs only its own share.
void Probe::Run(uint32_t thread, uint32_t) {
  const char* data = memory_.data() + thread * stride_;
  double done = 0;
  uint64_t at = 0;
  do {
    done += work_(data + at);
    at = at + kReadBlock < stride_ ? at + kReadBlock : 0;
  } while (MonotonicNs() < deadline_ns_);
  std::memcpy(done_.data() + thread * kSlot, &done, sizeof(done));
}

}  // namespace llmc
