"""Speed of the quantized linear kernels on one thread, beside the limits of one thread measured right before.

Run: python -m bench.bench_linear_quant [--scheme w8a8 w4a8] [--rows 1 8 512] [--group-size 64] [--dtype bf16]
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from bench.bench_linear import SHAPES, aligned, best_time, load
from llmc.compiler.targets.cpu.backend import named, native
from llmc.compiler.targets.cpu.kernels.codegen import compile_object
from llmc.compiler.targets.cpu.kernels.linear.spec import linear_quant_spec
from llmc.compiler.targets.cpu.kernels.registry import build_kernel
from llmc.compiler.targets.cpu.packing import pack_activation
from llmc.compiler.targets.cpu.quant_packing import pack_quantized, pack_quantized_activation, quantize_activation
from llmc.compiler.targets.cpu.target import Target
from llmc.quantize import SCHEMES, Scheme
from llmc.runtime.binding.machine_limits import Probe


def bench(folder: Path, target: Target, scheme: Scheme, dtype: str, rows: int, k: int, n: int) -> tuple[float, float]:
    """(GOP/s, GB/s of weights and scales). With few rows it cycles through copies that no cache holds.

    dtype: type of activations that are floats.
    """
    tile, format = target.row_tile_for(rows), scheme.weight
    act = "i8" if scheme.act_bits == 8 else dtype
    spec = linear_quant_spec(n, k, tile, act, format)
    function = load(folder, spec.symbol(), compile_object(build_kernel(spec, target), target))
    rng = np.random.default_rng(0)
    floats = rng.standard_normal((rows, k)).astype(np.float32)
    if act == "i8":
        assert format.sums is not None
        x: Any = pack_quantized_activation(*quantize_activation(floats), tile, format.sums)
    else:
        x = pack_activation(floats.astype(ml_dtypes.bfloat16) if act == "bf16" else floats, tile)
    packed = pack_quantized(rng.standard_normal((n, k)).astype(np.float32), target.panel_columns, format)
    nbytes = sum(a.nbytes for a in packed.values())
    copies = max(1, (256 << 20) // nbytes) if rows <= 16 else 1
    weights = [{name: aligned(a) for name, a in packed.items()} for _ in range(copies)]
    x, y = aligned(x), aligned(np.zeros((rows, n), np.float32))
    scalars = (ctypes.c_int64 * 8)(rows)
    names = ["numbers", *(plane.name for plane in format.planes(k))]

    def call() -> None:
        for w in weights:
            function(*[ctypes.c_void_p(a.ctypes.data) for a in (x, *(w[m] for m in names), y)], scalars, 0, 1)

    best = best_time(call, 6 if rows <= 16 else 20) / copies
    return 2 * rows * n * k / best / 1e9, nbytes / best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="native")
    parser.add_argument("--scheme", nargs="+", default=list(SCHEMES), choices=list(SCHEMES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 512])
    parser.add_argument("--dtype", default="f32", choices=["f32", "bf16"], help="of the activations of a16 schemes")
    parser.add_argument("--group-size", type=int)
    parser.add_argument("--asymmetric", action="store_true", default=None)
    options = parser.parse_args()
    target = (native() if options.target == "native" else named(options.target)).cpu
    with tempfile.TemporaryDirectory() as name, Probe(num_threads=1, pin_threads=False) as probe:
        folder = Path(name)
        for scheme_name in options.scheme:
            scheme = SCHEMES[scheme_name]
            if scheme.weight.is_regrouped:
                scheme = scheme.with_weight(options.group_size, options.asymmetric)
            products = "int8" if scheme.act_bits == 8 and target.int8_dot else "f32"
            peak, memory = ((probe.measure(limit) or 0.0) / 1e9 for limit in (products, "read"))
            print(f"{target.name}: {products} peak {peak:.0f} GOP/s, memory read {memory:.1f} GB/s, one thread")
            print(f"{'scheme':8}{'rows':>5}{'K':>6}{'N':>6}{'GOP/s':>8}{'% peak':>8}{'GB/s':>8}{'% read':>8}")
            for rows in options.rows:
                for k, n in SHAPES:
                    ops, gbytes = bench(folder, target, scheme, options.dtype, rows, k, n)
                    shares = f"{100 * ops / peak:8.1f}{gbytes:8.2f}{100 * gbytes / memory:8.1f}"
                    print(f"{scheme_name:8}{rows:5}{k:6}{n:6}{ops:8.0f}{shares}", flush=True)


if __name__ == "__main__":
    main()
