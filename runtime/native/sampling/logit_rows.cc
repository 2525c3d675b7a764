#include "sampling/logit_rows.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "core/isa.h"

namespace llmc {
namespace {

#define LLMC_INLINE inline __attribute__((always_inline))

constexpr uint32_t kBlock = 2048;
constexpr uint32_t kLineFloats = 16;  // floats of a cache line

LLMC_INLINE int32_t Bits(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

LLMC_INLINE float FromBits(int32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// Maps bits of floats without NaN to integers of the same order, and back.
LLMC_INLINE int32_t Ordered(int32_t bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }

LLMC_INLINE float Exp(float x) {
  const float t = x < -87.0f ? -87.0f : x;
  const float shifted = t * 1.44269504f + 12582912.0f;  // 1.5·2^23: the sum is rounded to an integer
  const float n = shifted - 12582912.0f;
  float r = t - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const float scale = FromBits((static_cast<int32_t>(n) + 127) * (1 << 23));
  return x < -87.0f ? 0.0f : p * scale;
}

LLMC_INLINE RowScan Scan(const float* row, uint32_t n) {
  int32_t highest = std::numeric_limits<int32_t>::min(), largest = 0;
  RowScan out;
  for (uint32_t begin = 0; begin < n; begin += kBlock) {
    const uint32_t end = std::min(begin + kBlock, n);
    // Prefetches the next block: much of a row is in caches of other cores, which computed it.
    for (uint32_t i = end; i < std::min(end + kBlock, n); i += kLineFloats) __builtin_prefetch(row + i);
    int32_t high = std::numeric_limits<int32_t>::min();
    for (uint32_t i = begin; i < end; ++i) {
      const int32_t bits = Bits(row[i]), magnitude = bits & 0x7fffffff, order = Ordered(bits);
      largest = magnitude > largest ? magnitude : largest;
      high = order > high ? order : high;
    }
    if (begin != 0 && high <= highest) continue;
    // -0 is below +0 in this order, though they are equal as floats: keep the block of the first zero.
    const bool zeros = begin != 0 && FromBits(Ordered(high)) == FromBits(Ordered(highest));
    highest = high;
    if (zeros) continue;
    out.max_begin = begin;
    out.max_end = end;
  }
  out.max = FromBits(Ordered(highest));
  out.finite = largest < 0x7f800000;
  return out;
}

LLMC_INLINE void ExpAll(const float* row, uint32_t n, float max, float scale, float* out) {
  for (uint32_t i = 0; i < n; ++i) out[i] = Exp((row[i] - max) * scale);
}

LLMC_INLINE double Sum(const float* row, uint32_t n) {
  double lanes[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  uint32_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (uint32_t j = 0; j < 8; ++j) lanes[j] += row[i + j];
  }
  for (uint32_t j = 0; i < n; ++i, ++j) lanes[j] += row[i];
  double sum = 0;
  for (double lane : lanes) sum += lane;
  return sum;
}

struct Passes {
  RowScan (*scan)(const float*, uint32_t);
  void (*exp)(const float*, uint32_t, float, float, float*);
  double (*sum)(const float*, uint32_t);
};

// No attribute that is resolved at load time, such as target_clones: sanitizers are not ready then.
#define LLMC_PASSES(name, target)                                                           \
  target RowScan Scan##name(const float* row, uint32_t n) { return Scan(row, n); }          \
  target void Exp##name(const float* row, uint32_t n, float max, float scale, float* out) { \
    ExpAll(row, n, max, scale, out);                                                        \
  }                                                                                         \
  target double Sum##name(const float* row, uint32_t n) { return Sum(row, n); }             \
  constexpr Passes k##name{Scan##name, Exp##name, Sum##name};

LLMC_PASSES(Plain, )
#if defined(__x86_64__)
LLMC_PASSES(Avx2, __attribute__((target("avx2"))))
#if defined(__clang__)
#define LLMC_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"), min_vector_width(512)))
#else
#define LLMC_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif
LLMC_PASSES(Avx512, LLMC_AVX512)
#undef LLMC_AVX512
#endif
#undef LLMC_PASSES

const Passes& Widest() {
#if defined(__x86_64__)
  const uint32_t level = MachineIsaLevel();
  return level >= 2 ? kAvx512 : level == 1 ? kAvx2 : kPlain;
#else
  return kPlain;
#endif
}

}  // namespace

RowScan ScanRow(const float* row, uint32_t n) { return Widest().scan(row, n); }
void ExpRow(const float* row, uint32_t n, float max, float scale, float* out) { Widest().exp(row, n, max, scale, out); }
double SumRow(const float* row, uint32_t n) { return Widest().sum(row, n); }
double SumSpans(const float* row, uint32_t n) {
  double total = 0;
  for (uint32_t begin = 0; begin < n; begin += kSumSpan) total += SumRow(row + begin, std::min(kSumSpan, n - begin));
  return total;
}
float ExpNegative(float x) { return Exp(x); }

}  // namespace llmc
