"""Speed of the attention kernel on one thread, beside the limit of one thread measured in the same rounds.

Decode counts the KV cache that it reads, prefill the multiply-adds of visible keys, each being two operations.

Run: python -m bench.bench_attention [--target native] [--seconds 3] [--context 32768] [--prompt 512 2048]
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from bench.bench_linear import aligned, load
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.backend import named, native
from llmc.compiler.targets.cpu.kernels.attention_split import num_segments, partial_floats
from llmc.compiler.targets.cpu.kernels.codegen import compile_object
from llmc.compiler.targets.cpu.kernels.registry import build_kernel, kernel_buffers
from llmc.compiler.targets.cpu.target import Target
from llmc.runtime.binding.machine_limits import Probe

BLOCK = 32
# (heads, kv heads, head_dim) of groups of 7, 4 and 1.
SHAPES = ((14, 2, 64), (32, 8, 64), (8, 2, 128), (4, 4, 128))
COPIES = 4  # of the pools, so that no cache holds what a decode step reads


def bench(
    folder: Path, target: Target, shape: tuple[int, int, int], dtype: str, context: int, rows: int, seconds: float
) -> tuple[float, float, float]:
    """`rows` last tokens of a sequence: (rate, limit, fraction), medians over rounds, in 10^9 a second.

    One row is a decode step: bytes; more are prefill: operations.
    """
    heads, kv_heads, dim = shape
    tile, blocks = target.row_tile_for(rows), -(-context // BLOCK)
    segments = num_segments(context, BLOCK) if rows == 1 else 0
    spec = KernelSpec.of(
        "attention",
        "paged_attention",
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        scale=dim**-0.5,
        window=0,
        row_tile=tile,
        act_dtype=dtype,
        kv_dtype=dtype,
        block_size=BLOCK,
        segments=segments,
    )
    function = load(folder, spec.symbol(), compile_object(build_kernel(spec, target), target))
    rng = np.random.default_rng(0)
    kind = np.dtype(np.float32) if dtype == "f32" else np.dtype(ml_dtypes.bfloat16)
    noise = rng.standard_normal(1 << 20).astype(np.float32).astype(kind)
    pool = np.resize(noise, (blocks + 1) * kv_heads * BLOCK * dim)
    pools = [(aligned(pool), aligned(pool)) for _ in range(COPIES if rows == 1 else 1)]
    arrays = {
        "q": rng.standard_normal((rows, heads * dim)).astype(np.float32),
        "block_tables": (rng.permutation(blocks) + 1).astype(np.int32),
        "token_seq": np.zeros(rows, np.int32),
        "positions": np.arange(context - rows, context, dtype=np.int32),
        "partials": np.zeros(max(1, rows * heads * segments * partial_floats(dim)), np.float32),
        "out": np.zeros(-(-rows // tile) * tile * heads * dim, np.float32),
    }
    arrays = {name: aligned(array) for name, array in arrays.items()}
    scalars = (ctypes.c_int64 * 8)(rows, 1, 1, blocks, blocks + 1)

    def call(keys: Any, values: Any) -> None:
        named = {**arrays, "k_pool": keys, "v_pool": values}
        buffers = [ctypes.c_void_p(named[name].ctypes.data) for name in kernel_buffers(spec)]
        function(*buffers, scalars, 0, 1)

    visible = sum(range(context - rows + 1, context + 1))
    work = context * kv_heads * dim * 2 * kind.itemsize if rows == 1 else 4 * heads * dim * visible
    limit = "read" if rows == 1 else "f32"
    rates: list[float] = []
    limits: list[float] = []
    with Probe(num_threads=1) as probe:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(rates) < 3:
            limits.append((probe.measure(limit, 0.02) or 0.0) / 1e9)
            start = time.perf_counter()
            for keys, values in pools:
                call(keys, values)
            rates.append(work * len(pools) / (time.perf_counter() - start) / 1e9)
    fraction = statistics.median(rate / most for rate, most in zip(rates, limits, strict=True))
    return statistics.median(rates), statistics.median(limits), fraction


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="native")
    parser.add_argument("--dtype", nargs="+", default=["f32", "bf16"], choices=["f32", "bf16"])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each figure")
    parser.add_argument("--context", type=int, nargs="*", default=[32768], help="tokens in the cache of a decode step")
    parser.add_argument("--prompt", type=int, nargs="*", default=[512, 2048], help="tokens of a prefill")
    options = parser.parse_args()
    target = (native() if options.target == "native" else named(options.target)).cpu
    steps = [(n, 1) for n in options.context] + [(n, n) for n in options.prompt]
    print(f"{'heads':>9}{'dim':>5} {'dtype':6}{'step':>15}{'reached':>16}{'limit':>8}{'% of limit':>12}")
    with tempfile.TemporaryDirectory() as name:
        for dtype in options.dtype:
            for heads, kv_heads, dim in SHAPES:
                for context, rows in steps:
                    shape = (heads, kv_heads, dim)
                    rate, most, fraction = bench(Path(name), target, shape, dtype, context, rows, options.seconds)
                    step, unit = ("decode", "GB/s") if rows == 1 else ("prefill", "GFLOP/s")
                    print(
                        f"{f'{heads}/{kv_heads}':>9}{dim:5} {dtype:6}{f'{step} {context}':>15}"
                        f"{rate:8.1f} {unit:7}{most:8.1f}{100 * fraction:12.0f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
