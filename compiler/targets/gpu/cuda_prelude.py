"""Prelude of CUDA C++ kernels: the functions that their text calls. Imports no tvm."""

PRELUDE = """\
// Kernels of llmc in CUDA C++ (runtime/FORMAT.md).
typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;

__device__ __forceinline__ int llmc_num_groups() { return (int)gridDim.x; }
__device__ __forceinline__ float llmc_max(float a, float b) { return a > b ? a : b; }
__device__ __forceinline__ float llmc_min(float a, float b) { return a < b ? a : b; }
// All items of the group arrive, and see each other's writes to memory of any kind.
__device__ __forceinline__ void llmc_sync_written() { __syncthreads(); }
// Items that run in step.
__device__ __forceinline__ constexpr int llmc_lanes() { return 32; }
// The sum of four products of signed bytes.
__device__ __forceinline__ int llmc_dot4(int a, int b) { return __dp4a(a, b, 0); }
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
// The number. Nothing that depends on it is computed earlier.
__device__ __forceinline__ int llmc_late(int number) {
  asm volatile("" : "+r"(number));
  return number;
}
// word & mask | bits, in one instruction: of two constants, one is in a register.
__device__ __forceinline__ uint llmc_masked(uint word, uint mask, uint bits) {
  uint found;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(found) : "r"(word), "r"(mask), "r"(bits));
  return found;
}
// Sums of two pairs.
__device__ __forceinline__ uint llmc_added_bf16(uint pair, uint other) {
  uint sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(pair), "r"(0x3F803F80u), "r"(other));
  return sum;
}
__device__ __forceinline__ uint llmc_added_f16(uint pair, uint other) {
  uint sum;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(pair), "r"(other));
  return sum;
}
// Products of a pair with one factor of both; a zero keeps its sign.
__device__ __forceinline__ uint llmc_times_bf16(uint pair, uint factor) {
  uint product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(pair), "r"(factor * 0x10001u), "r"(0x80008000u));
  return product;
}
__device__ __forceinline__ uint llmc_times_f16(uint pair, uint factor) {
  uint product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(factor * 0x10001u));
  return product;
}
// A byte for each of the last four nibbles: FF if its highest bit is set, otherwise 80.
__device__ __forceinline__ uint llmc_highest(uint nibbles) {
  uint found;
  asm("prmt.b32 %0, %1, %1, %2;" : "=r"(found) : "r"(0x80808080u), "r"(nibbles));
  return found;
}
// Nearest, ties to even.
__device__ __forceinline__ uint llmc_rounded_bf16(float low, float high) {
  uint pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ uint llmc_rounded_f16(float low, float high) {
  uint pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ float llmc_low_f16(uint pair) {
  float number;
  asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"((ushort)pair));
  return number;
}
// The number that the lane has whose bits differ by `lanes`.
template <typename Number>
__device__ __forceinline__ Number llmc_of_lane(Number own, int lanes) {
  return __shfl_xor_sync(0xFFFFFFFFu, own, lanes);
}
// A matrix of 8 by 8 halves, of which lane 4r + t has two neighbours of row r from 2t on, with rows as columns.
__device__ __forceinline__ uint llmc_transposed(uint pair) {
  uint turned;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}
// From global memory to shared memory while the kernel goes on. The rest of the line is wanted soon.
__device__ __forceinline__ void llmc_copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;"
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
// Brings a line of global memory to the L2 cache.
__device__ __forceinline__ void llmc_prefetch(const void* of) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(of)));
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
__device__ __forceinline__ void llmc_store8(void* to, const uint* from) { *(uint2*)to = make_uint2(from[0], from[1]); }
// How a kernel begins beside the one before it (target option `dependent`): until it has waited, it reads only what no
// kernel writes. Every kernel waits. So where one has ended, all before it have ended, too, and those behind it may
// write to what they read.
#ifdef LLMC_DEPENDENT
__device__ __forceinline__ void llmc_await_earlier() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void llmc_let_later_begin() { asm volatile("griddepcontrol.launch_dependents;"); }
#else
__device__ __forceinline__ void llmc_await_earlier() {}
__device__ __forceinline__ void llmc_let_later_begin() {}
#endif
"""
"""Parts that need a GPU; tests define host functions of the same names."""

NUMBERS = """\
// Numbers of a weight minus their zero point, as pairs of halves, exactly. A number becomes the low bits of 128 as
// bf16, or of 1024 as f16, and one addition takes both off.
__device__ __forceinline__ void llmc_nibbles(uint* to, uint packed, uint magic) {
  const uint even = packed & 0x0F0F0F0Fu, odd = packed >> 4 & 0x0F0F0F0Fu;
  to[0] = llmc_masked(__byte_perm(even, odd, 0x0400), 0x00FF00FFu, magic);
  to[1] = llmc_masked(__byte_perm(even, odd, 0x0501), 0x00FF00FFu, magic);
  to[2] = llmc_masked(__byte_perm(even, odd, 0x0602), 0x00FF00FFu, magic);
  to[3] = llmc_masked(__byte_perm(even, odd, 0x0703), 0x00FF00FFu, magic);
}
#define LLMC_NIBBLES(half, magic, negative)                                                             \\
  __device__ __forceinline__ void llmc_nibbles_##half(uint* to, uint packed, uint zero) {               \\
    llmc_nibbles(to, packed, magic * 0x10001u);                                                         \\
    for (int i = 0; i < 4; ++i) to[i] = llmc_added_##half(to[i], (negative | zero) * 0x10001u);         \\
  }
LLMC_NIBBLES(bf16, 0x4300u, 0xC300u)
LLMC_NIBBLES(f16, 0x6400u, 0xE400u)
__device__ __forceinline__ void llmc_bytes_f16(uint* to, uint packed, uint zero) {
  const uint less = (0xE400u | zero) * 0x10001u;
  to[0] = llmc_added_f16(__byte_perm(packed, 0x64646464u, 0x4140), less);
  to[1] = llmc_added_f16(__byte_perm(packed, 0x64646464u, 0x4342), less);
}
// bf16 has too few bits for 128 and a byte, so these are the low bits of 2^23 as float.
__device__ __forceinline__ float llmc_byte(uint packed, uint which, float offset) {
  return as_float(__byte_perm(packed, 0x4B000000u, 0x7440u | which)) - offset;
}
__device__ __forceinline__ void llmc_bytes_bf16(uint* to, uint packed, uint zero) {
  const float offset = as_float(0x4B000000u | zero);
  for (uint i = 0; i < 2; ++i) {
    const float low = llmc_byte(packed, 2 * i, offset), high = llmc_byte(packed, 2 * i + 1, offset);
    to[i] = __byte_perm(as_uint(low), as_uint(high), 0x7632);
  }
}
// Four floats of E4M3. Their exponent and mantissa as those of a half are a power of two too small.
__device__ __forceinline__ uint llmc_signed(uint pair, uint magnitude) {
  return llmc_masked(pair, 0x80008000u, magnitude);
}
__device__ __forceinline__ void llmc_e4m3_bf16(uint* to, uint packed) {
  const uint low = __byte_perm(packed, 0, 0x1404), high = __byte_perm(packed, 0, 0x3424);
  to[0] = llmc_times_bf16(llmc_signed(low, low >> 4 & 0x07F007F0u), 0x7B80u);
  to[1] = llmc_times_bf16(llmc_signed(high, high >> 4 & 0x07F007F0u), 0x7B80u);
}
__device__ __forceinline__ void llmc_e4m3_f16(uint* to, uint packed) {
  const uint low = __byte_perm(packed, 0, 0x1404), high = __byte_perm(packed, 0, 0x3424);
  to[0] = llmc_times_f16(llmc_signed(low, low >> 1 & 0x3F803F80u), 0x5C00u);
  to[1] = llmc_times_f16(llmc_signed(high, high >> 1 & 0x3F803F80u), 0x5C00u);
}
// Eight floats of E2M1: a nibble without its sign selects the bytes of one of 0, 0.5, 1, 1.5, 2, 3, 4 and 6.
__device__ __forceinline__ void llmc_e2m1(uint* to, uint packed, uint low0, uint low4, uint high0, uint high4) {
  for (int i = 0; i < 2; ++i, packed >>= 16) {
    const uint low = __byte_perm(low0, low4, packed), high = __byte_perm(high0, high4, packed);
    const uint with_sign = llmc_masked(llmc_highest(packed) << 7, 0x80808080u, high);
    to[2 * i] = __byte_perm(low, with_sign, 0x5140);
    to[2 * i + 1] = __byte_perm(low, with_sign, 0x7362);
  }
}
__device__ __forceinline__ void llmc_e2m1_bf16(uint* to, uint packed) {
  llmc_e2m1(to, packed, 0xC0800000u, 0xC0804000u, 0x3F3F3F00u, 0x40404040u);
}
__device__ __forceinline__ void llmc_e2m1_f16(uint* to, uint packed) {
  llmc_e2m1(to, packed, 0, 0, 0x3E3C3800u, 0x46444240u);
}
// Eight integers of llama.cpp's table of 16, by the bytes of their halves: each half of the table gives one, and the
// highest bit of a nibble says which of both it is.
struct Codes { uint first0, first4, last0, last4; };
__device__ __forceinline__ uint llmc_coded(Codes of, uint nibbles) {
  const uint which = llmc_masked(nibbles >> 1, 0x4444u, 0x3210u);
  return __byte_perm(__byte_perm(of.first0, of.first4, nibbles), __byte_perm(of.last0, of.last4, nibbles), which);
}
__device__ __forceinline__ void llmc_iq4_nl(uint* to, uint packed, Codes lows, Codes highs) {
  for (int i = 0; i < 2; ++i, packed >>= 16) {
    const uint low = llmc_coded(lows, packed), high = llmc_coded(highs, packed);
    to[2 * i] = __byte_perm(low, high, 0x5140);
    to[2 * i + 1] = __byte_perm(low, high, 0x7362);
  }
}
__device__ __forceinline__ void llmc_iq4_nl_bf16(uint* to, uint packed) {
  llmc_iq4_nl(to, packed, {0x82A6D0FEu, 0x20B00C44u, 0x18C85080u, 0xE2B28A54u},
              {0xC2C2C2C2u, 0xC1C1C2C2u, 0x4241413Fu, 0x42424242u});
}
__device__ __forceinline__ void llmc_iq4_nl_f16(uint* to, uint packed) {
  llmc_iq4_nl(to, packed, {0x103080F0u, 0x00806020u, 0xC0408000u, 0x109050A0u},
              {0xD4D5D6D7u, 0xC9CDD0D2u, 0x504E4A3Cu, 0x57555452u});
}
// A lane's two bytes of both halves of a step.
__device__ __forceinline__ void llmc_load2_twice(uint* to, const void* first, const void* second, int lane) {
  to[0] = ((const ushort*)first)[lane] | (uint)((const ushort*)second)[lane] << 16;
}
// Eight nibbles as bytes.
__device__ __forceinline__ void llmc_nibbles_i8(uint* to, uint packed) {
  const uint even = packed & 0x0F0F0F0Fu, odd = packed >> 4 & 0x0F0F0F0Fu;
  to[0] = __byte_perm(even, odd, 0x5140);
  to[1] = __byte_perm(even, odd, 0x7362);
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
FULL_DEPENDENT = "#define LLMC_DEPENDENT\n" + FULL
"""For kernels that begin beside the one before them, from compute capability 9.0 on."""
