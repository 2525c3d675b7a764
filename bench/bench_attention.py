"""Speed of the attention kernel on one thread, beside the limit of one thread measured in the same rounds.

Decode is rated by bytes read of the KV cache, scales included. Prefill is rated by multiply-adds with visible keys, two
operations each. Types of the KV cache take turns; the last column compares each with the first in the same rounds.

Run: python -m bench.bench_attention [--target native] [--seconds 3] [--context 32768] [--prompt 512 2048]
    [--dtype bf16 f32] [--kv-dtype bf16 int8 fp8_e4m3]
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
from numpy.typing import NDArray

from bench.bench_linear import aligned, load
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.backend import named, native
from llmc.compiler.targets.cpu.kernels.attention_split import num_segments, partial_floats
from llmc.compiler.targets.cpu.kernels.codegen import compile_object
from llmc.compiler.targets.cpu.kernels.registry import build_kernel, kernel_buffers
from llmc.compiler.targets.cpu.target import Target
from llmc.kv_dtypes import KV_DTYPES
from llmc.runtime.binding.machine_limits import Probe

BLOCK = 32
# (heads, kv heads, head_dim) of groups of 7, 4 and 1.
SHAPES = ((14, 2, 64), (32, 8, 64), (8, 2, 128), (4, 4, 128))
COPIES = 4  # copies of the pools, so that no cache holds the data of a decode step


class Step:
    """Attention of a sequence's last `rows` tokens with one type of KV cache; one row is a decode step."""

    def __init__(
        self, folder: Path, target: Target, shape: tuple[int, int, int], act: str, kv: str, context: int, rows: int
    ) -> None:
        heads, kv_heads, dim = shape
        tile, blocks = target.row_tile_for(rows), -(-context // BLOCK)
        segments = num_segments(context, BLOCK) if rows == 1 else 0
        self._spec = spec = KernelSpec.of(
            "attention",
            "paged_attention",
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            scale=dim**-0.5,
            window=0,
            row_tile=tile,
            act_dtype=act,
            kv_dtype=kv,
            block_size=BLOCK,
            segments=segments,
        )
        self._function = load(folder, spec.symbol(), compile_object(build_kernel(spec, target), target))
        rng = np.random.default_rng(0)
        pool = _pool(rng, kv, dim, (blocks + 1) * kv_heads)
        self._pools = [(aligned(pool), aligned(pool)) for _ in range(COPIES if rows == 1 else 1)]
        arrays = {
            "q": rng.standard_normal((rows, heads * dim)).astype(np.float32),
            "block_tables": (rng.permutation(blocks) + 1).astype(np.int32),
            "token_seq": np.zeros(rows, np.int32),
            "positions": np.arange(context - rows, context, dtype=np.int32),
            "partials": np.zeros(max(1, rows * heads * segments * partial_floats(dim)), np.float32),
            "out": np.zeros(-(-rows // tile) * tile * heads * dim, np.float32),
        }
        self._arrays = {name: aligned(array) for name, array in arrays.items()}
        self._scalars = (ctypes.c_int64 * 8)(rows, 1, 1, blocks, blocks + 1)
        visible = sum(range(context - rows + 1, context + 1))
        token = 2 * (dim * KV_DTYPES[kv].item_bytes + KV_DTYPES[kv].scale_bytes)
        self.work = context * kv_heads * token if rows == 1 else 4 * heads * dim * visible

    def seconds(self) -> float:
        """Seconds of one step."""
        start = time.perf_counter()
        for keys, values in self._pools:
            given = {**self._arrays, "k_pool": keys, "v_pool": values}
            buffers = [ctypes.c_void_p(given[name].ctypes.data) for name in kernel_buffers(self._spec)]
            self._function(*buffers, self._scalars, 0, 1)
        return (time.perf_counter() - start) / len(self._pools)


def _pool(rng: np.random.Generator, kv: str, dim: int, parts: int) -> NDArray[Any]:
    """Random keys or values. parts: number of heads' parts of blocks."""
    dtype = KV_DTYPES[kv]
    if dtype.largest is None:
        kind = np.dtype({"f32": np.float32, "f16": np.float16}.get(kv, ml_dtypes.bfloat16))
        noise = rng.standard_normal(1 << 20).astype(np.float32).astype(kind)
        return np.resize(noise, parts * BLOCK * dim)
    # Every byte below 0x78 is a finite number.
    pool = np.resize(rng.integers(0, 0x78, 1 << 20).astype(np.uint8), (parts, BLOCK * (dim + dtype.scale_bytes)))
    pool[:, BLOCK * dim :] = np.full((parts, BLOCK), 0.01, np.float32).view(np.uint8)
    return pool


def bench(steps: dict[str, Step], limit: str, seconds: float) -> dict[str, tuple[float, float, float, float]]:
    """(rate, limit, fraction, speed relative to the first) by type of KV cache: medians over rounds, rates in 10^9/s.

    limit: name of the machine's limit. seconds: time for each type.
    """
    times: dict[str, list[float]] = {kv: [] for kv in steps}
    limits: list[float] = []
    with Probe(num_threads=1) as probe:
        end = time.perf_counter() + seconds * len(steps)
        while time.perf_counter() < end or len(limits) < 3:
            limits.append((probe.measure(limit, 0.02) or 0.0) / 1e9)
            for kv, step in steps.items():
                times[kv].append(step.seconds())
    found = {}
    first = next(iter(steps))
    for kv, step in steps.items():
        rates = [step.work / each / 1e9 for each in times[kv]]
        fraction = statistics.median(rate / most for rate, most in zip(rates, limits, strict=True))
        gain = statistics.median(a / b for a, b in zip(times[first], times[kv], strict=True))
        found[kv] = statistics.median(rates), statistics.median(limits), fraction, gain
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="native")
    parser.add_argument("--dtype", default="bf16", choices=["f32", "bf16"], help="of activations")
    parser.add_argument("--kv-dtype", nargs="+", default=["bf16", "f32", "int8"], choices=list(KV_DTYPES))
    parser.add_argument("--seconds", type=float, default=3.0, help="of each figure")
    parser.add_argument("--context", type=int, nargs="*", default=[32768], help="tokens in the cache of a decode step")
    parser.add_argument("--prompt", type=int, nargs="*", default=[512, 2048], help="tokens of a prefill")
    options = parser.parse_args()
    target = (native() if options.target == "native" else named(options.target)).cpu
    wanted = [(n, 1) for n in options.context] + [(n, n) for n in options.prompt]
    print(f"{'heads':>9}{'dim':>5} {'KV':9}{'step':>15}{'reached':>16}{'limit':>8}{'% of limit':>12}{'speed':>8}")
    with tempfile.TemporaryDirectory() as name:
        for heads, kv_heads, dim in SHAPES:
            for context, rows in wanted:
                shape = (heads, kv_heads, dim)
                kvs = dict.fromkeys(options.kv_dtype)
                steps = {kv: Step(Path(name), target, shape, options.dtype, kv, context, rows) for kv in kvs}
                step, unit, limit = ("decode", "GB/s", "read") if rows == 1 else ("prefill", "GFLOP/s", "f32")
                for kv, (rate, most, fraction, gain) in bench(steps, limit, options.seconds).items():
                    print(
                        f"{f'{heads}/{kv_heads}':>9}{dim:5} {kv:9}{f'{step} {context}':>15}"
                        f"{rate:8.1f} {unit:7}{most:8.1f}{100 * fraction:12.0f}{gain:8.2f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
