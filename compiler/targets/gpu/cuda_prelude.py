"""Prelude of CUDA C++ kernels: the functions that their text calls. Imports no tvm."""

PRELUDE = """\
// Kernels of llmc in CUDA C++ (runtime/FORMAT.md).
typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;

__device__ __forceinline__ int llmc_num_groups() { return (int)gridDim.x; }
__device__ __forceinline__ float llmc_max(float a, float b) { return a > b ? a : b; }
__device__ __forceinline__ float llmc_min(float a, float b) { return a < b ? a : b; }
__device__ __forceinline__ int as_int(float x) { return __float_as_int(x); }
__device__ __forceinline__ uint as_uint(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float as_float(int x) { return __int_as_float(x); }
__device__ __forceinline__ float as_float(uint x) { return __uint_as_float(x); }
__device__ __forceinline__ long long as_long(double x) { return __double_as_longlong(x); }
__device__ __forceinline__ double as_double(long long x) { return __longlong_as_double(x); }
"""
"""For all kernels."""

TENSOR_CORES = """\
// Fragments are as the PTX manual has them for m16n8k16 and m16n8k32: a is 16 rows by K, b 8 columns by K, c 16 by 8.
__device__ __forceinline__ void llmc_mma_bf16(float* c, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void llmc_mma_f16(float* c, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void llmc_mma_i8(int* c, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ uint llmc_pair_f16(float low, float high) {
  uint pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// Nearest, ties to even.
__device__ __forceinline__ uint llmc_rounded_bf16(float low, float high) {
  uint pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ uint llmc_rounded_f16(float low, float high) { return llmc_pair_f16(low, high); }
__device__ __forceinline__ float llmc_low_f16(uint pair) {
  float number;
  asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"((ushort)pair));
  return number;
}
// The number that the lane has whose bits differ by `lanes`.
__device__ __forceinline__ float llmc_of_lane(float own, int lanes) {
  return __shfl_xor_sync(0xFFFFFFFFu, own, lanes);
}
// A matrix of 8 by 8 halves, of which lane 4r + t has two neighbours of row r from 2t on, with rows as columns.
__device__ __forceinline__ uint llmc_transposed(uint pair) {
  uint turned;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}
// From global memory to shared memory while the kernel goes on.
__device__ __forceinline__ void llmc_copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
               :: "r"((uint)__cvta_generic_to_shared(to)), "l"(__cvta_generic_to_global(from)) : "memory");
}
__device__ __forceinline__ void llmc_copy4(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
               :: "r"((uint)__cvta_generic_to_shared(to)), "l"(__cvta_generic_to_global(from)) : "memory");
}
__device__ __forceinline__ void llmc_copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// For all copies of this item but the `count` groups that ended last.
template <int count>
__device__ __forceinline__ void llmc_copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(count) : "memory");
}
__device__ __forceinline__ void llmc_load16(uint* to, const void* from) {
  const uint4 words = *(const uint4*)from;
  to[0] = words.x, to[1] = words.y, to[2] = words.z, to[3] = words.w;
}
__device__ __forceinline__ void llmc_load8(uint* to, const void* from) {
  const uint2 words = *(const uint2*)from;
  to[0] = words.x, to[1] = words.y;
}
__device__ __forceinline__ void llmc_load4(uint* to, const void* from) { to[0] = *(const uint*)from; }
__device__ __forceinline__ void llmc_store16(void* to, const uint* from) {
  *(uint4*)to = make_uint4(from[0], from[1], from[2], from[3]);
}
"""
"""Parts that need a GPU; tests define host functions of the same names."""

NUMBERS = """\
// Numbers of a weight as halves, exactly. offset: 2^23 and their zero point.
__device__ __forceinline__ float llmc_number(uint number, float offset) {
  return as_float(0x4B000000u | number) - offset;
}
__device__ __forceinline__ uint llmc_pair_bf16(float low, float high) {
  return (as_uint(low) >> 16) | (as_uint(high) & 0xFFFF0000u);
}
#define LLMC_NUMBERS(half)                                                                                     \\
  __device__ __forceinline__ void llmc_nibbles_##half(uint* to, uint packed, float offset) {                   \\
    for (int i = 0; i < 4; ++i, packed >>= 8)                                                                  \\
      to[i] = llmc_pair_##half(llmc_number(packed & 15, offset), llmc_number(packed >> 4 & 15, offset));       \\
  }                                                                                                            \\
  __device__ __forceinline__ void llmc_bytes_##half(uint* to, uint packed, float offset) {                     \\
    for (int i = 0; i < 2; ++i, packed >>= 16)                                                                 \\
      to[i] = llmc_pair_##half(llmc_number(packed & 255, offset), llmc_number(packed >> 8 & 255, offset));     \\
  }
LLMC_NUMBERS(bf16)
LLMC_NUMBERS(f16)
// Eight nibbles as bytes.
__device__ __forceinline__ void llmc_nibbles_i8(uint* to, uint packed) {
  for (int i = 0; i < 2; ++i, packed >>= 16)
    to[i] = (packed & 15) | (packed & 0xF0) << 4 | (packed & 0xF00) << 8 | (packed & 0xF000) << 12;
}
"""
"""Converts numbers of quantized weights to tensor core operands."""

HALVES = """\
// Parts of pairs of halves.
__device__ __forceinline__ float llmc_low_bf16(uint pair) { return as_float(pair << 16); }
__device__ __forceinline__ float llmc_high_bf16(uint pair) { return as_float(pair & 0xFFFF0000u); }
__device__ __forceinline__ float llmc_high_f16(uint pair) { return llmc_low_f16(pair >> 16); }
__device__ __forceinline__ uint llmc_lows(uint a, uint b) { return (a & 0xFFFFu) | b << 16; }
__device__ __forceinline__ uint llmc_highs(uint a, uint b) { return a >> 16 | (b & 0xFFFF0000u); }
"""
"""Takes pairs of halves apart, for attention on tensor cores."""

PORTABLE = PRELUDE, NUMBERS, HALVES
"""Parts that also compile as host C++."""
FULL = PRELUDE + TENSOR_CORES + NUMBERS + HALVES
