"""Prelude of CUDA C++ kernels that multiply with Hopper's `wgmma`. Imports no tvm."""

from __future__ import annotations

from itertools import product

_COLUMNS = (8, 16, 64, 128)
"""Rows of x of a product, which are columns of its result."""
_TYPES = {
    "bf16": ("float", "+f", "k16.f32.bf16.bf16", ", 1, 1, 0"),
    "f16": ("float", "+f", "k16.f32.f16.f16", ", 1, 1, 0"),
    "i8": ("int", "+r", "k32.s32.u8.s8", ""),
}
"""By type of x: a sum in C and in assembly, the kind of product, and that no operand is negated or transposed."""


def _product(dtype: str, columns: int) -> str:
    """The product of 64 weight rows, which warps have in registers, by rows of x in shared memory."""
    kind, register, shape, more = _TYPES[dtype]
    count = columns // 2
    sums = ",".join(f"%{i}" for i in range(count))
    a = ",".join(f"%{count + i}" for i in range(4))
    outputs = ", ".join(f'"{register}"(c[{i}])' for i in range(count))
    text = f"wgmma.mma_async.sync.aligned.m64n{columns}{shape} {{{sums}}}, {{{a}}}, %{count + 4}, p{more};"
    return f"""\
template <>
{_head(dtype, kind, str(columns))} {{
  asm volatile("{{.reg .pred p; setp.ne.b32 p, 1, 0; {text}}}"
      : {outputs} : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(x));
}}
"""


def _head(dtype: str, kind: str, columns: str = "") -> str:
    of = f"<{columns}>" if columns else ""
    arguments = f"{kind}* c, uint a0, uint a1, uint a2, uint a3, Matrices x"
    return f"__device__ __forceinline__ void llmc_wgmma_of_{dtype}{of}({arguments})"


_DECLARATIONS = "".join(f"template <int n>\n{_head(dtype, kind)};\n" for dtype, (kind, *_) in _TYPES.items())

PRODUCTS = f"""\
typedef unsigned long long Matrices;
// Products of warp groups, which run while their warps go on. Nothing may read or write sums of such products, nor the
// registers of their operands, until they were waited for.
{_DECLARATIONS}{"".join(_product(dtype, columns) for dtype, columns in product(_TYPES, _COLUMNS))}\
// Neither the compiler nor the GPU moves what is done with sums across these two.
template <int count>
__device__ __forceinline__ void llmc_sums_stay(float* c) {{
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(c[i])::"memory");
}}
template <int count>
__device__ __forceinline__ void llmc_sums_stay(int* c) {{
  for (int i = 0; i < count; ++i) asm volatile("" : "+r"(c[i])::"memory");
}}
template <int count, class Sum>
__device__ __forceinline__ void llmc_products_begin(Sum* c) {{
  llmc_sums_stay<count>(c);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}}
__device__ __forceinline__ void llmc_products_end() {{ asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }}
// Operands are used until here, so that the compiler gives their registers to nothing else.
template <int count, int operands, class Sum>
__device__ __forceinline__ void llmc_products_wait(Sum* c, const uint* a) {{
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  llmc_sums_stay<count>(c);
  for (int i = 0; i < operands; ++i) asm volatile("" ::"r"(a[i]));
}}
__device__ __forceinline__ uint llmc_shared_address(const void* of) {{ return (uint)__cvta_generic_to_shared(of); }}
// Four matrices of 8 rows by 16 bytes: lane 4r + t has word t of row r of each; lane 8m + r has the address of row r of
// matrix m.
__device__ __forceinline__ void llmc_store_matrices(void* to, const uint* from) {{
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {{%1,%2,%3,%4}};"
               :: "r"(llmc_shared_address(to)), "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3]) : "memory");
}}
// Products see what this item stored.
__device__ __forceinline__ void llmc_shared_visible() {{ asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }}
"""
"""Parts that need a GPU; tests define host functions of the same names."""

MATRICES = """\
// The descriptor of rows of x for one product, without swizzle: matrices of 8 rows by 16 bytes are contiguous. The next
// one along K follows at 128 bytes, that of the next 8 rows at 512.
__device__ __forceinline__ unsigned long long llmc_matrices(const void* first) {
  const unsigned long long along = 128 >> 4, rows = 512 >> 4;
  return (llmc_shared_address(first) & 0x3FFFFu) >> 4 | along << 16 | rows << 32;
}
#define LLMC_WGMMA(dtype, sum)                                                                                    \\
  template <int n>                                                                                                \\
  __device__ __forceinline__ void llmc_wgmma_##dtype(sum* c, uint a0, uint a1, uint a2, uint a3, const void* x) { \\
    llmc_wgmma_of_##dtype<n>(c, a0, a1, a2, a3, llmc_matrices(x));                                                \\
  }
LLMC_WGMMA(bf16, float)
LLMC_WGMMA(f16, float)
LLMC_WGMMA(i8, int)
"""
"""Also compiles as host C++."""

WGMMA = PRODUCTS + MATRICES
"""Behind what all kernels have (`cuda_prelude`)."""
