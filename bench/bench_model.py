"""Prefill, decode and start of one artifact, beside the machine's limits measured in the same run.

    python bench/bench_model.py ARTIFACT [--threads N] [--repeat 5] [--json]

Rounds are interleaved: every round measures the limits and each figure once; medians and ranges are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from limits import Limits

from llmc.runtime.binding import Artifact, Engine, Replayer
from llmc.runtime.params import SamplingParams

PREFILLS = (128, 512, 2048)
BATCHES = (1, 8)
DECODE_CONTEXT = 128
DECODE_STEPS = 16


def ints(values: object) -> np.ndarray:
    return np.asarray(values, np.int32)


class Bench:
    """Drives graphs of one artifact by hand: no scheduler, no sampler."""

    def __init__(self, path: Path, threads: int) -> None:
        self.artifact = Artifact(path)
        self.info = self.artifact.info
        self.blocks_per_seq = -(-self.info.max_model_len // self.info.block_size)
        self.replayer = Replayer(self.artifact, num_threads=threads, num_blocks=self.blocks_per_seq * max(BATCHES))
        self.rng = np.random.default_rng(0)

    def graph(self, phase: str, batch: int, tokens: int, context: int) -> int | None:
        fitting = [
            (g.max_tokens, g.max_blocks_per_seq, i)
            for i, g in enumerate(self.artifact.graphs())
            if g.phase == phase
            and g.batch >= batch
            and g.max_tokens >= tokens
            and g.max_blocks_per_seq * self.info.block_size >= context
        ]
        return min(fitting)[2] if fitting else None

    def run(self, graph: int, num_seqs: int, tokens: int, start: int) -> float:
        """Seconds of one replay of `tokens` new tokens a sequence at position `start`."""
        block_size, width = self.info.block_size, self.blocks_per_seq
        tables = np.arange(1, 1 + num_seqs * width, dtype=np.int32).reshape(num_seqs, width)
        positions = np.tile(np.arange(start, start + tokens, dtype=np.int32), num_seqs)
        rows = np.repeat(np.arange(num_seqs), tokens)
        slots = tables[rows, positions // block_size] * block_size + positions % block_size
        ids = self.rng.integers(2, self.info.vocab_size, num_seqs * tokens, dtype=np.int32)
        starts = ints(np.arange(num_seqs + 1) * tokens)
        begin = time.perf_counter()
        self.replayer.run(
            graph, ids, positions, ints(slots), tables, ints([start + tokens] * num_seqs), starts, starts[1:] - 1
        )
        return time.perf_counter() - begin

    def prefill(self, tokens: int) -> float | None:
        """Tokens a second."""
        graph = self.graph("prefill", 1, tokens, tokens)
        return None if graph is None else tokens / self.run(graph, 1, tokens, 0)

    def decode(self, batch: int) -> float | None:
        """Tokens a second over all sequences."""
        graph = self.graph("decode", batch, batch, DECODE_CONTEXT + DECODE_STEPS)
        if graph is None:
            return None
        seconds = sum(self.run(graph, batch, 1, DECODE_CONTEXT + step) for step in range(DECODE_STEPS))
        return batch * DECODE_STEPS / seconds


def first_token_seconds(path: Path) -> float:
    """A fresh Python process: import, open, one prompt of 16 tokens, first token."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, __file__, str(path), "--first-token"], check=True)
    return time.perf_counter() - begin


def first_token(path: Path) -> None:
    engine = Engine(Artifact(path))
    engine.submit(list(range(2, 18)), SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    while not engine.poll():
        engine.step()


def matrix_elements(manifest: dict[str, object]) -> tuple[float, float]:
    """(elements of the layers' matrices, elements of the output projection)."""
    m = manifest["model"]
    assert isinstance(m, dict)
    qkv = (m["num_heads"] + 2 * m["num_kv_heads"]) * m["head_dim"] * m["hidden_size"]
    out = m["num_heads"] * m["head_dim"] * m["hidden_size"]
    layer = qkv + out + 3 * m["hidden_size"] * m["intermediate_size"]
    return float(layer * m["num_layers"]), float(m["vocab_size"] * m["hidden_size"])


def measure(path: Path, threads: int, repeat: int) -> dict[str, list[float]]:
    limits, bench = Limits(), Bench(path, threads)
    figures: dict[str, list[float]] = defaultdict(list)
    for i in range(repeat + 1):
        row: dict[str, float | None] = {
            "read bandwidth, GB/s": limits.read_bandwidth(threads) / 1e9,
            "f32 peak, GFLOP/s": limits.fma_peak(threads) / 1e9,
        }
        for tokens in PREFILLS:
            row[f"prefill {tokens}, tok/s"] = bench.prefill(tokens)
        for batch in BATCHES:
            row[f"decode batch {batch}, tok/s"] = bench.decode(batch)
        row["fresh process to first token, s"] = first_token_seconds(path)
        if i:  # the first round warms up
            for name, value in row.items():
                if value is not None:
                    figures[name].append(value)
    figures["peak memory, GiB"] = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)]
    return figures


def fractions(figures: dict[str, list[float]], manifest: dict[str, object]) -> dict[str, str]:
    """What each figure is of the limit that binds it."""
    layers, head = matrix_elements(manifest)
    item = 2 if manifest["act_dtype"] == "bf16" else 4
    bandwidth = statistics.median(figures["read bandwidth, GB/s"])
    peak = statistics.median(figures["f32 peak, GFLOP/s"])
    out = {}
    for name, values in figures.items():
        value = statistics.median(values)
        if name.startswith("prefill"):
            out[name] = f"{value * 2 * layers / 1e9 / peak:.0%} of the f32 peak"
        elif name.startswith("decode batch 1,"):
            out[name] = f"{value * (layers + head) * item / 1e9 / bandwidth:.0%} of the read bandwidth"
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--first-token", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.first_token:
        first_token(arguments.artifact)
        return
    figures = measure(arguments.artifact, arguments.threads, arguments.repeat)
    manifest = json.loads((arguments.artifact / "manifest.json").read_text())
    notes = fractions(figures, manifest)
    if arguments.json:
        print(json.dumps({"figures": figures, "fractions": notes, "target": manifest["target"]}, indent=1))
        return
    for name, values in figures.items():
        spread = f"{min(values):.4g}–{max(values):.4g}"
        print(f"{name:34} {statistics.median(values):10.4g}  ({spread})  {notes.get(name, '')}")


if __name__ == "__main__":
    main()
