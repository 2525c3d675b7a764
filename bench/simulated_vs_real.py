"""Accuracy of `llmc buckets simulate`: serves a trace by an artifact, and compares with the prediction.

    python -m bench.simulated_vs_real ARTIFACT TRACE [--requests 400] [--scale 0.25] [--load 0.3] [--rounds 5]

A round serves the requests greedily, with made-up tokens, and predicts that. Between steps, with the clock stopped, it
measures costs by the replays that `llmc warmup` makes, one at a time. Thus the prediction is not blamed for a machine
whose speed drifts. All rounds serve the same requests at the same pace. Latencies are percentiles over requests, each
the median of its rounds: slow spells, which meet other requests in every round, drop out. Other rows are medians of
the rounds. The column `worst` is the largest error of a single round. The last column shows measurements of single
rounds relative to the figure shown. Option --scale shortens prompts and outputs to the model's context. Option --load
sets the pace of arrivals, as the share of time in which the prediction is busy.

With one thread, the default, the clock is the thread's CPU time, which excludes other programs and other machines on
the host. Requests arrive by that clock; while idle it jumps to the next arrival. Submitting requests and bookkeeping
are excluded, since a server does them on another thread. With more threads the clock is wall time, and the machine must
be quiet.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llmc.buckets.bucket import Bucket
from llmc.buckets.cost_table import CostTable, ReplayCost
from llmc.buckets.step_cost import StepCosts
from llmc.buckets.trace import Trace, read_trace
from llmc.machine import PADDING, machine_facts
from llmc.runtime.binding import Artifact, Engine
from llmc.runtime.binding.sampling import SamplingParams
from llmc.runtime.simulation.what_if import WhatIf, artifact_ladder, percentile
from llmc.runtime.warm_up.overhead import measure_overhead
from llmc.runtime.warm_up.warm_up import WarmPlan, WarmUp

Clock = Callable[[], int]  # nanoseconds
Floats = npt.NDArray[np.float64]

LATENCIES: dict[str, Callable[[Floats], float]] = {
    "p50": lambda values: percentile(values, 50),
    "mean": lambda values: float(np.mean(values)),
    "p99": lambda values: percentile(values, 99),
}


@dataclass(frozen=True)
class Served:
    """Results of one round. ttft_s, total_s: seconds [request]. replays: counts [graph]."""

    ttft_s: Floats
    total_s: Floats
    busy_s: float
    replays: list[int]
    padded_rows: int


class Timed:
    """The engine's warm-up, timed by another clock."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine, self._clock = engine, clock
        self.walk_graph, self.enable_graph = engine.walk_graph, engine.enable_graph

    def warm_load(self, graph: int, num_seqs: int, tokens_each: int, context: int) -> int:
        begin, wall = self._clock(), time.monotonic_ns()
        replay = self._engine.warm_load(graph, num_seqs, tokens_each, context)
        # The call's time around the replay is no part of a step.
        around = time.monotonic_ns() - wall - replay
        return max(1, self._clock() - begin - around)


class LoadMeter:
    """Measures every load of some graphs again and again, one replay at a time."""

    def __init__(
        self, artifact: Artifact, engine: Engine, order: tuple[int, ...], seconds: float, clock: Clock
    ) -> None:
        self._info, self._graphs = artifact.info, artifact.graphs()
        self._plan = WarmPlan(order, len(order), measure=frozenset(order), measure_s=seconds)
        self._engine = Timed(engine, clock)
        self.rounds: list[list[ReplayCost]] = []
        self._begin()

    def _begin(self) -> None:
        self._costs: list[ReplayCost] = []
        self._warming = WarmUp(
            self._engine,
            self._graphs,
            self._plan,
            block_size=self._info.block_size,
            max_model_len=self._info.max_model_len,
        )

    def advance(self) -> None:
        """One replay."""
        step = self._warming.advance()
        if step is None:
            return
        bucket = Bucket(step.graph.phase, step.graph.batch, step.graph.seq)
        for one in step.measured:
            tokens = one.load.num_seqs * one.load.tokens_each
            load = bucket, one.load.num_seqs, tokens, one.load.context
            self._costs.append(ReplayCost(*load, one.seconds, one.repeats))
        if self._warming.done:
            self.rounds.append(self._costs)
            self._begin()

    def costs(self) -> list[ReplayCost]:
        """The means of what was measured; what is missing to have measured all once is done now."""
        while not self.rounds:
            self.advance()
        loads = [{cost.load: cost for cost in costs} for costs in self.rounds]
        return [
            replace(cost, seconds=statistics.fmean(other[load].seconds for other in loads))
            for load, cost in loads[0].items()
        ]


class CostMeter:
    """Measures costs as `llmc warmup` does, which replays a graph many times in a row.

    Decode graphs are replayed after decode steps, others after prefill: a CPU is slower for a while after much
    arithmetic.
    """

    def __init__(self, artifact: Artifact, engine: Engine, seconds: float, clock: Clock) -> None:
        self._engine = engine
        order = WarmPlan.of_all(artifact.graphs()).order
        decode = [artifact.graphs()[index].phase == "decode" for index in order]
        self._decode, self._prefill = (
            LoadMeter(artifact, engine, tuple(i for i, one in zip(order, decode, strict=True) if one is of), seconds,
                      clock)
            for of in (True, False)
        )  # fmt: skip
        self._overheads: list[tuple[float, float]] = []

    def overhead(self, max_num_seqs: int) -> None:
        """Measures the engine's overhead while it has no requests."""
        self._overheads.append(measure_overhead(self._engine, max_num_seqs))

    def advance(self, *, after_decode: bool) -> None:
        """One replay."""
        (self._decode if after_decode else self._prefill).advance()

    def table(self) -> CostTable:
        """The means of what was measured; what is missing to have measured all once is done now."""
        costs = (*self._prefill.costs(), *self._decode.costs())
        step_s, token_s = (statistics.fmean(values) for values in zip(*self._overheads, strict=True))
        facts = machine_facts(self._engine.stats.device["threads"])
        return CostTable(facts, "0" * 64, costs, PADDING, step_s, token_s)


def serve(engine: Engine, trace: Trace, what_if: WhatIf, clock: Clock, meter: CostMeter, every_ms: float) -> Served:
    """Serves the requests by a clock that skips idle time. Advances the meter every `every_ms` of serving, so that both
    meet the same spells of the machine."""
    rng = np.random.default_rng(0)
    arrivals = trace.arrival_s / what_if.speed
    prompts = [rng.integers(0, 256, n).astype(np.int32) for n in what_if.prompts.tolist()]
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in what_if.outputs.tolist()]
    index_of: dict[int, int] = {}
    ttft, total = np.full(len(trace), np.nan), np.full(len(trace), np.nan)
    before, start, skipped_s, next_one, done = engine.graph_stats(), clock(), 0.0, 0, 0
    due, num_prefills = every_ms * 1e6, 0
    while done < len(trace):
        now = (clock() - start) / 1e9 + skipped_s
        handing_in = clock()
        while next_one < len(trace) and arrivals[next_one] <= now:
            index_of[engine.submit(prompts[next_one], params[next_one])] = next_one
            next_one += 1
        before_last, num_prefills = num_prefills, engine.stats.num_prefill_steps
        if handing_in - start >= due:
            due += every_ms * 1e6
            meter.advance(after_decode=num_prefills == before_last)
        start += clock() - handing_in
        if not engine.step() and next_one < len(trace):
            skipped_s += max(0.0, arrivals[next_one] - ((clock() - start) / 1e9 + skipped_s))
        events = engine.poll()
        handling = clock()
        now = (handling - start) / 1e9 + skipped_s
        for event in events:
            index = index_of[event.request_id]
            if event.kind == "token" and np.isnan(ttft[index]):
                ttft[index] = now - arrivals[index]
            if event.kind == "finished":
                done += 1
                total[index] = now - arrivals[index]
        start += clock() - handling
    busy_s = (clock() - start) / 1e9
    used = list(zip(before, engine.graph_stats(), strict=True))
    replays = [after.replays - graph.replays for graph, after in used]
    return Served(ttft, total, busy_s, replays, sum(after.padded_tokens - graph.padded_tokens for graph, after in used))


def predicted(what_if: WhatIf, path: Path) -> Served:
    """The same results as predicted by the simulation."""
    one = what_if.run(artifact_ladder(path)[0])
    rows = sum(graph.replays * graph.bucket.max_tokens for graph in one.graphs) - sum(load.tokens for load in one.loads)
    return Served(one.ttft_s, one.total_s, one.busy_s, [graph.replays for graph in one.graphs], int(rows))


def compared(rounds: list[tuple[Served, Served]], tokens: int) -> dict[str, dict[str, float]]:
    """Prediction and measurement by figure. rounds: (predicted, real). tokens: prompts and outputs of all requests."""
    rows: dict[str, dict[str, float]] = {}

    def row(name: str, guess: float, real: float, of_rounds: Sequence[tuple[float, float]]) -> None:
        errors = [one / other - 1 if other else 0.0 for one, other in of_rounds]
        rows[name] = {
            "predicted": guess,
            "real": real,
            "error": guess / real - 1 if real else 0.0,
            "worst": max(errors, key=abs),
            "lowest": min(other for _, other in of_rounds) / real if real else 1.0,
            "highest": max(other for _, other in of_rounds) / real if real else 1.0,
        }

    def scalar(name: str, of: Callable[[Served], float]) -> None:
        pairs = [(of(guess), of(real)) for guess, real in rounds]
        row(name, statistics.median(guess for guess, _ in pairs), statistics.median(real for _, real in pairs), pairs)

    scalar("busy, s", lambda one: one.busy_s)
    scalar("tokens a busy second", lambda one: tokens / one.busy_s)
    for name, field in (("request", "total_s"), ("first token", "ttft_s")):
        guesses, reals = ([getattr(pair[side], field) for pair in rounds] for side in (0, 1))
        for figure, of in LATENCIES.items():
            pairs = [(of(guess), of(real)) for guess, real in zip(guesses, reals, strict=True)]
            row(f"{name} {figure}, s", of(np.median(guesses, axis=0)), of(np.median(reals, axis=0)), pairs)
    scalar("steps", lambda one: sum(one.replays))
    scalar("padded rows", lambda one: one.padded_rows)
    same = [(sum(map(min, guess.replays, real.replays)), sum(real.replays)) for guess, real in rounds]
    row("steps in the same graph", statistics.median(n for n, _ in same), statistics.median(n for _, n in same), same)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--scale", type=float, default=0.25)
    parser.add_argument("--load", type=float, default=0.3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.1, help="for measuring each load")
    parser.add_argument("--every", type=float, default=4, metavar="MS", help="of serving between replays that measure")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    trace = read_trace(args.trace).first(args.requests)
    shorter = {
        name: np.maximum((getattr(trace, name) * args.scale).astype(np.int64), 1)
        for name in ("prompt_tokens", "output_tokens")
    }
    trace = replace(trace, **shorter, prefix_start=np.zeros(1, np.int64), prefix_ids=np.zeros(0, np.int64))
    clock: Clock = time.thread_time_ns if args.threads == 1 else time.monotonic_ns
    ladder, server = artifact_ladder(args.artifact)
    rounds: list[tuple[Served, Served]] = []
    speed = 0.0
    with Artifact(args.artifact) as artifact:
        for _ in range(args.rounds):
            with Engine(artifact, num_threads=args.threads, pin_threads=0) as engine:
                meter = CostMeter(artifact, engine, args.seconds, clock)
                meter.overhead(server.max_num_seqs)
                if not speed:
                    costs = StepCosts.of_table(meter.table(), "measured")
                    flat_out = WhatIf(trace, server, costs, speed=1e9).run(ladder)
                    speed = float(trace.arrival_s[-1]) * args.load / flat_out.busy_s
                    meter = CostMeter(artifact, engine, args.seconds, clock)
                    meter.overhead(server.max_num_seqs)
                what_if = WhatIf(trace, server, costs, speed=speed)
                real = serve(engine, trace, what_if, clock, meter, args.every)
                meter.overhead(server.max_num_seqs)
                costs = StepCosts.of_table(meter.table(), "measured")
            rounds.append((predicted(replace(what_if, costs=costs), args.artifact), real))
    rows = compared(rounds, int((what_if.prompts + what_if.outputs).sum()))
    if args.json:
        print(json.dumps({"speed": speed, "rounds": args.rounds, "figures": rows}, indent=2))
        return
    print(f"{len(trace)} requests at {speed:.3g} times the pace of the trace, {args.threads} threads")
    print(f"{'':24} {'predicted':>12} {'real':>12} {'error':>8} {'worst':>8}   real ones of single rounds")
    for name, row in rows.items():
        figures = f"{row['predicted']:12.5g} {row['real']:12.5g} {row['error']:+8.1%} {row['worst']:+8.1%}"
        print(f"{name:24} {figures}   {row['lowest'] - 1:+.0%} to {row['highest'] - 1:+.0%}")


if __name__ == "__main__":
    main()
