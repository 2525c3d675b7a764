"""Speed of the linear kernel on one thread, beside the FMA peak and a plain read of memory.

Run: python bench/bench_linear.py [--target native] [--dtype f32 bf16]
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from llmc.compiler.kernels import builder as b
from llmc.compiler.kernels import vector_ir
from llmc.compiler.kernels.pipeline import compile_object
from llmc.compiler.kernels.registry import build_kernel
from llmc.compiler.kernels.spec import KernelSpec
from llmc.compiler.link import link_shared
from llmc.compiler.packing import pack_activation, pack_linear
from llmc.compiler.targets.cpu import Target, resolve_target

SHAPES = ((896, 9728), (4864, 896))
ROWS = (1, 512)


def load(folder: Path, symbol: str, code: bytes) -> Any:
    path = folder / f"{symbol}.so"
    link_shared([code], path)
    function = ctypes.CDLL(str(path))[symbol]
    function.restype = None
    return function


def aligned(a: NDArray[Any]) -> NDArray[Any]:
    raw = np.zeros(a.nbytes + 64, np.uint8)
    view = raw[-raw.ctypes.data % 64 :][: a.nbytes].view(a.dtype).reshape(a.shape)
    view[...] = a
    return view


def fma_peak(folder: Path, target: Target) -> float:
    """GFLOP/s of independent chains of 16-wide fma in registers."""
    chains = 16 if target.lanes == 16 else 6
    kernel = b.Kernel("fma_peak", [("out", "float32")], vector_ir.helpers(target.mcpu))
    with kernel as k:
        acc, factor = b.Vectors(chains), b.Vectors(2)
        factor[0], factor[1] = b.load_vector(k["out"], 0), b.load_vector(k["out"], 16)
        for i in range(chains):
            acc[i] = b.load_vector(k["out"], 16 * i)
        with b.T.serial(k.scalar(0)):
            for i in range(chains):
                acc[i] = b.call("fma", factor[0], acc[i], factor[1])
        for i in range(chains):
            b.store_vector(k["out"], acc[i], 16 * i)
    function = load(folder, "fma_peak", compile_object(kernel.function(), target))
    out, steps = aligned(np.full(16 * chains, 0.5, np.float32)), 2_000_000
    scalars = (ctypes.c_int64 * 8)(steps)
    best = best_time(lambda: function(ctypes.c_void_p(out.ctypes.data), scalars, 0, 1), 8)
    return steps * chains * 32 / best / 1e9


def best_time(call: Any, repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.thread_time()
        call()
        best = min(best, time.thread_time() - start)
    return best


def read_speed() -> float:
    """GB/s of reading 256 MB in one pass."""
    data = np.ones(64 << 20, np.float32)
    return data.nbytes / best_time(lambda: data.max(), 8) / 1e9


def bench(folder: Path, target: Target, dtype: str, rows: int, k: int, n: int) -> tuple[float, float]:
    """(GFLOP/s, GB/s of weights). One row cycles through copies of the weights that no cache holds."""
    tile = target.row_tile_for(rows)
    spec = KernelSpec.of(
        "linear",
        "linear",
        k=k,
        n=n,
        row_tile=tile,
        act_dtype=dtype,
        weight_dtype=dtype,
        bias=False,
        residual=False,
        rows=0,
    )
    function = load(folder, spec.symbol(), compile_object(build_kernel(spec, target), target))
    numpy_dtype = np.dtype(np.float32) if dtype == "f32" else np.dtype(ml_dtypes.bfloat16)
    rng = np.random.default_rng(0)
    x = aligned(pack_activation(rng.standard_normal((rows, k)).astype(np.float32).astype(numpy_dtype), tile))
    weight = pack_linear(rng.standard_normal((n, k)).astype(np.float32).astype(numpy_dtype), target.panel_columns)
    copies = max(1, (256 << 20) // weight.nbytes) if rows == 1 else 1
    weights = [aligned(weight) for _ in range(copies)]
    y = aligned(np.zeros((rows, n), np.float32))
    scalars = (ctypes.c_int64 * 8)(rows)

    def call() -> None:
        for w in weights:
            function(*[ctypes.c_void_p(a.ctypes.data) for a in (x, w, y)], scalars, 0, 1)

    best = best_time(call, 6 if rows == 1 else 20) / copies
    return 2 * rows * n * k / best / 1e9, weight.nbytes / best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="native")
    parser.add_argument("--dtype", nargs="+", default=["f32", "bf16"], choices=["f32", "bf16"])
    options = parser.parse_args()
    target = resolve_target(options.target)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        peak, memory = fma_peak(folder, target), read_speed()
        print(f"{target.name}: f32 fma peak {peak:.1f} GFLOP/s, memory read {memory:.1f} GB/s, one thread")
        print(f"{'dtype':6}{'rows':>5}{'K':>6}{'N':>6}{'GFLOP/s':>10}{'% peak':>8}{'GB/s':>8}")
        for dtype in options.dtype:
            for rows in ROWS:
                for k, n in SHAPES:
                    flops, gbytes = bench(folder, target, dtype, rows, k, n)
                    print(f"{dtype:6}{rows:5}{k:6}{n:6}{flops:10.1f}{100 * flops / peak:8.1f}{gbytes:8.2f}")


if __name__ == "__main__":
    main()
