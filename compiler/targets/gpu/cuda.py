"""CUDA: the same kernels in CUDA C++, built by nvcc. There is no device for them yet, so no target is made of this."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tvm_ffi

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.base import LinkError
from llmc.compiler.targets.gpu.codegen import Language, kernel_text
from llmc.compiler.targets.gpu.kernels.registry import build_kernel

ARCHITECTURES = ("sm_80", "sm_90a")
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
"""What all kernels of a program share: functions that their texts call."""
_COMPILE = "tvm_callback_cuda_compile"


def cuda_text(spec: KernelSpec) -> str:
    """A kernel in CUDA C++. Raises KernelSpecError."""
    head = 'extern "C" __global__ void __launch_bounds__({items})'
    with _uncompiled():
        return kernel_text(build_kernel(spec), Language({"kind": "cuda", "arch": ARCHITECTURES[0]}, head))


@contextmanager
def _uncompiled() -> Iterator[None]:
    """TVM compiles what it writes at once, unless this says that it has."""
    ours = tvm_ffi.get_global_func(_COMPILE, allow_missing=True)

    def nothing(_code: Any) -> bytes:
        return b""

    tvm_ffi.register_global_func(_COMPILE, nothing, override=True)
    try:
        yield
    finally:
        if ours is not None:
            tvm_ffi.register_global_func(_COMPILE, ours, override=True)


def build_cubin(texts: Sequence[str], architecture: str) -> tuple[bytes, str]:
    """The machine code of these kernels, and what the assembler says of their registers. Raises LinkError."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise LinkError("no `nvcc` on PATH: install a CUDA toolkit to build kernels for its GPUs")
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "kernels.cu", Path(folder) / "kernels.cubin"
        source.write_text("\n".join((PRELUDE, *texts)))
        # As OpenCL is built: no contraction, division and roots as IEEE 754 has them, subnormal numbers kept.
        exact = ["--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false"]
        command = [nvcc, "-cubin", f"-arch={architecture}", *exact, "-Xptxas", "-v", "-o", str(cubin), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise LinkError(f"nvcc cannot build {len(texts)} kernels for {architecture}: {done.stderr.strip()[:2000]}")
        return cubin.read_bytes(), done.stderr
