"""Figures of one artifact, each measured between two probes of the limit that binds it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from llmc.graphs_format import FAMILIES, PHASES
from llmc.manifest import read_manifest
from llmc.runtime.binding import Artifact, Engine, Replayer
from llmc.runtime.binding.machine_limits import Probe
from llmc.runtime.graphs_file import read_graphs
from llmc.runtime.profile.costs import Cost, arithmetic, kernel_params, step_cost
from llmc.runtime.profile.steps import Step

UNITS = {"read": (1e9, "GB/s"), "f32": (1e9, "GFLOP/s"), "bf16": (1e9, "GFLOP/s"), "int8": (1e9, "GOP/s")}
MIN_PROBE_S = 0.2


@dataclass
class Figure:
    """Values of one figure, one per round. limits: mean of the probes before and after it.

    work: operations or bytes per unit of the figure, by way of counting them.
    """

    name: str
    unit: str
    limit: str | None = None
    work: dict[str, float] = field(default_factory=dict)
    values: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)

    def fractions(self) -> dict[str, list[float]]:
        """Each value as a fraction of its own limit, by way of counting the work."""
        return {
            way: [value * amount / limit for value, limit in zip(self.values, self.limits, strict=True)]
            for way, amount in self.work.items()
        }

    def as_dict(self) -> dict[str, Any]:
        fractions = self.fractions()
        return {
            "name": self.name,
            "unit": self.unit,
            **spread(self.values),
            "limit": self.limit,
            "limit_per_s": spread(self.limits) if self.limits else None,
            "fractions": {way: spread(values) for way, values in fractions.items()},
        }


def spread(values: list[float]) -> dict[str, Any]:
    """Median, minimum, maximum and the values themselves."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "rounds": values}


class Bench:
    """Replays the graphs of one artifact directly: no scheduler, no sampler."""

    def __init__(self, path: Path, threads: int, max_batch: int) -> None:
        self.path, self.threads = path, threads
        self.artifact, self.tables, self.manifest = Artifact(path), read_graphs(path), read_manifest(path)
        self.model = self.tables.model
        self.probe = Probe(threads)
        blocks = max_batch * -(-self.model.max_model_len // self.model.block_size)
        # Copied weights, as in a server: the figures stand for a process that runs long.
        self.replayer = Replayer(self.artifact, num_threads=threads, num_blocks=blocks, weight_memory="copied")
        # The layers over all tokens; the output projection may have another dtype.
        layers = [p for p in kernel_params(self.manifest).values() if "n" in p and p.get("rows") == 0]
        limits = {arithmetic("linear", params, self.tables.target) for params in layers}
        self.products = next((limit for limit in ("int8", "bf16") if limit in limits), "f32")

    def graph(self, phase: str, step: Step) -> int | None:
        """The smallest graph of the phase that holds the step."""
        blocks = -(-max(step.contexts) // self.model.block_size)
        fitting = [
            (g.max_tokens, g.max_blocks_per_seq, i)
            for i, g in enumerate(self.tables.graphs)
            if PHASES[g.phase] == phase
            and g.batch >= len(step.sequences)
            and g.max_tokens >= step.num_tokens
            and g.max_blocks_per_seq >= blocks
        ]
        return min(fitting)[2] if fitting else None

    def cost(self, graph: int, step: Step) -> dict[str, Cost]:
        """Costs of a step by kernel family."""
        return step_cost(self.tables, self.manifest, self.tables.graphs[graph], step)

    def tokens_per_s(self, graph: int, steps: list[Step]) -> float:
        """New tokens per second inside the replays of `steps`, run one after the other."""
        before = self.replayer.stats.total_ns
        for i, step in enumerate(steps):
            step.run(self.replayer, graph, self.model.block_size, self.model.vocab_size, seed=i)
        return sum(step.num_tokens for step in steps) / (self.replayer.stats.total_ns - before) * 1e9

    def decode_overhead(self, prompt_tokens: int, output_tokens: int) -> dict[str, float]:
        """Shares of the decode steps of one request through the engine: kernels, barrier, overhead."""
        from llmc.runtime.offline.decode_shares import decode_shares

        with Engine(self.artifact, num_threads=self.threads, max_num_seqs=1, weight_memory="copied") as engine:
            prompt = [i % (self.model.vocab_size - 2) + 2 for i in range(prompt_tokens)]
            engine.submit(prompt, max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
            while engine.step():
                engine.poll()
            shares = decode_shares(engine.stats)
        assert shares is not None
        return shares


Measure = Callable[[], float]


def speed_figures(bench: Bench, prefills: Sequence[int], decodes: Sequence[tuple[int, int]], steps: int,
                  ) -> list[tuple[Figure, Measure]]:  # fmt: skip
    """Figures for prefill of one prompt and decode of a batch, where the artifact has the graphs.

    prefills: prompt tokens. decodes: (batch, tokens that each sequence has before). steps: decode steps timed.
    """
    found: list[tuple[Figure, Measure]] = []
    for tokens in prefills:
        step = Step(((0, tokens),))
        graph = bench.graph("prefill", step)
        if tokens > bench.model.max_model_len or graph is None:
            continue
        cost = bench.cost(graph, step)
        matrices = cost["linear"].flops / tokens
        work = {"matrices": matrices, "with attention": matrices + cost["attention"].flops / tokens}
        figure = Figure(f"prefill {tokens}", "tok/s", bench.products, work)
        found.append((figure, partial(bench.tokens_per_s, graph, [step])))
    for batch, context in decodes:
        sequence = [Step(((context + i, 1),) * batch) for i in range(steps)]
        graph = bench.graph("decode", sequence[-1])
        if graph is None:
            continue
        cost = bench.cost(graph, sequence[steps // 2])
        weights = sum(cost[family].memory_bytes for family in FAMILIES if family not in ("attention", "rope"))
        moved = sum(cost[family].memory_bytes for family in FAMILIES)
        work = {"weights": weights / batch, "with KV cache": moved / batch}
        figure = Figure(f"decode batch {batch} behind {context}", "tok/s", "read", work)
        found.append((figure, partial(bench.tokens_per_s, graph, sequence)))
    return found


def run_rounds(bench: Bench, figures: list[tuple[Figure, Measure]], rounds: int) -> None:
    """Measures every figure once per round, right between two probes that last about as long as it does."""
    durations: dict[str, float] = {}
    for number in range(rounds + 1):
        for figure, measure in figures:
            seconds = max(MIN_PROBE_S, min(durations.get(figure.name, 0.0), 2.0))
            before = bench.probe.measure(figure.limit, seconds) if figure.limit else None
            begin = time.perf_counter()
            value = measure()
            durations[figure.name] = time.perf_counter() - begin
            after = bench.probe.measure(figure.limit, seconds) if figure.limit else None
            if number == 0:
                continue  # warm-up
            figure.values.append(value)
            if before is not None and after is not None:
                figure.limits.append((before + after) / 2)
