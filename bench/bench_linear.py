"""Speed of the linear kernel on one thread, beside the limits of one thread measured right before.

Run: python -m bench.bench_linear [--target native] [--dtype f32 bf16 f16]
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.targets.cpu.backend import named, native
from llmc.compiler.targets.cpu.kernels.codegen import compile_object
from llmc.compiler.targets.cpu.kernels.linear.spec import linear_spec
from llmc.compiler.targets.cpu.kernels.registry import build_kernel
from llmc.compiler.targets.cpu.packing import pack_activation, pack_linear
from llmc.compiler.targets.cpu.target import Target, enable
from llmc.compiler.targets.elf.link import link_shared
from llmc.models.convert import DTYPES
from llmc.runtime.binding.machine_limits import Probe

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


def best_time(call: Any, repeats: int) -> float:
    """Seconds of the fastest call, by the wall clock, which also measures the limits."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def bench(folder: Path, target: Target, dtype: str, rows: int, k: int, n: int) -> tuple[float, float]:
    """(GFLOP/s, GB/s of weights). With one row it cycles through copies of the weights, so that no cache holds them."""
    tile = target.row_tile_for(rows)
    spec = linear_spec(n, k, tile, dtype)
    function = load(folder, spec.symbol(), compile_object(build_kernel(spec, target), target))
    numpy_dtype = DTYPES[dtype]
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
    parser.add_argument("--dtype", nargs="+", default=["f32", "bf16"], choices=list(DTYPES))
    options = parser.parse_args()
    target = (native() if options.target == "native" else named(options.target)).cpu
    enable(target)
    with tempfile.TemporaryDirectory() as name, Probe(num_threads=1) as probe:
        folder = Path(name)
        for dtype in options.dtype:
            products = "bf16" if dtype == "bf16" and target.bf16_dot else "f32"
            peak, memory = ((probe.measure(limit) or 0.0) / 1e9 for limit in (products, "read"))
            print(f"{target.name}: {products} peak {peak:.1f} GFLOP/s, memory read {memory:.1f} GB/s, one thread")
            print(f"{'dtype':6}{'rows':>5}{'K':>6}{'N':>6}{'GFLOP/s':>10}{'% peak':>8}{'GB/s':>8}{'% read':>8}")
            for rows in ROWS:
                for k, n in SHAPES:
                    flops, gbytes = bench(folder, target, dtype, rows, k, n)
                    shares = f"{100 * flops / peak:8.1f}{gbytes:8.2f}{100 * gbytes / memory:8.1f}"
                    print(f"{dtype:6}{rows:5}{k:6}{n:6}{flops:10.1f}{shares}")


if __name__ == "__main__":
    main()
