"""Cost of LoRA adapters: tokens/s of decode steps with several adapters, relative to the model alone.

    python -m bench.bench_lora BASE LORAS [--adapters 8] [--rank 16] [--layers attention|all] [--streams 16] [--json]

BASE is an artifact without adapter slots, LORAS one of the same model with them. Both engines run the same prompts and
take turns of some steps, to meet the same state of the machine; threads of the other sleep. A turn's ratio is
LORAS over BASE in tokens/s of its fastest step; medians and quartiles over turns are printed. Adapters are random. A
third engine, LORAS without an adapter in use, shows the cost of adapter commands without work. With --threads 1 the
clock is the thread's CPU time, which excludes other programs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from llmc.runtime.binding import Artifact, Engine, SamplingParams
from llmc.runtime.binding.adapter_matrices import AdapterMatrix

PROMPT_TOKENS, TURN_STEPS = 64, 8
ATTENTION = (".attention.qkv.weight", ".attention.out.weight")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("loras", type=Path)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", choices=("attention", "all"), default="all")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rates = measure(given)
    found = {name: summary([mine / base for mine, base in zip(of, rates["base"], strict=True)])
             for name, of in rates.items()}  # fmt: skip
    best = {name: max(of) for name, of in rates.items()}
    if given.json:
        print(json.dumps({"best_tokens_per_s": best, "of_base": found}, indent=1))
        return 0
    print(f"{given.adapters} adapters of rank {given.rank}, {given.layers} layers, {given.streams} sequences")
    for name, (low, median, high) in found.items():
        print(f"{name:<8} {best[name]:9.1f} tokens/s at best  {median:6.3f} of base ({low:.3f} to {high:.3f})")
    return 0


def measure(given: argparse.Namespace) -> dict[str, list[float]]:
    """Tokens/s of each turn, by engine."""
    rng = np.random.default_rng(0)
    paths = {"base": given.base, "idle": given.loras, "loras": given.loras}
    engines: dict[str, Engine] = {}
    steps = (given.turns + 1) * TURN_STEPS + 1
    for name, path in paths.items():
        with Artifact(path) as artifact:
            engine = engines[name] = Engine(
                artifact, num_threads=given.threads, idle_spin_us=0, weight_memory="copied", max_num_seqs=given.streams
            )
            adapters = [0]
            if name == "loras":
                adapters = [
                    engine.load_adapter(random_adapter(artifact, given.rank, given.layers, rng))
                    for _ in range(given.adapters)
                ]
            prompts = rng.integers(5, artifact.info.vocab_size, (given.streams, PROMPT_TOKENS))
        params = SamplingParams(temperature=0.0, max_tokens=steps + 64, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            engine.submit(prompt, params, adapter=adapters[i % len(adapters)])
        while engine.stats.output_tokens < given.streams:
            engine.step()
            engine.poll()
    rates: dict[str, list[float]] = {name: [] for name in paths}
    for turn in range(given.turns + 1):
        # In changing order; the first turn warms up.
        for name in rng.permutation(list(paths)):
            rate = turn_rate(
                engines[name], given.streams, time.thread_time if given.threads == 1 else time.perf_counter
            )
            if turn:
                rates[name].append(rate)
    for engine in engines.values():
        engine.close()
    return rates


def turn_rate(engine: Engine, streams: int, clock: Callable[[], float]) -> float:
    """Tokens/s of the fastest of some decode steps."""
    engine.step()  # threads wake up
    engine.poll()
    seconds = []
    for _ in range(TURN_STEPS - 1):
        begin = clock()
        engine.step()
        seconds.append(clock() - begin)
    engine.poll()
    return streams / min(seconds)


def random_adapter(artifact: Artifact, rank: int, layers: str, rng: np.random.Generator) -> list[AdapterMatrix]:
    """Random matrices for every part of the adapted linear layers."""
    matrices = []
    for number, linear in enumerate(artifact.adapter_linears()):
        if layers == "all" or linear.name.endswith(ATTENTION):
            for part, rows in enumerate(linear.rows):
                a = rng.standard_normal((rank, linear.columns), np.float32) * np.float32(0.01)
                b = rng.standard_normal((rows, rank), np.float32) * np.float32(0.01)
                matrices.append(AdapterMatrix(number, part, 1.0, a, b))
    return matrices


def summary(ratios: Sequence[float]) -> tuple[float, float, float]:
    """(lower quartile, median, upper quartile)."""
    low, median, high = statistics.quantiles(ratios, n=4)
    return low, median, high


if __name__ == "__main__":
    raise SystemExit(main())
