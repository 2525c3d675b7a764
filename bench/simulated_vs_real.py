"""Holds `llmc buckets simulate` to the truth: a trace through an artifact for real, beside its prediction.

    python bench/simulated_vs_real.py ARTIFACT TRACE [--requests 400] [--scale 0.25] [--load 0.3] [--rounds 5]

A round measures costs as `llmc warmup` does, serves the requests, greedily, with made-up tokens, measures again and
predicts by the means of both: a machine whose speed drifts meanwhile is no fault of the prediction. A row shows the
medians of the rounds, of each percentile its own, and the median and the worst error among them. --scale shortens
prompts and outputs to the model's context; --load sets the pace of arrivals, so that the prediction is busy for such a
share of the time.

With one thread, the default, the clock of the measurements and of the replay is the CPU time of that thread: what other
programs or other machines on the same host take is not in it. Requests arrive by that clock, and while nothing is to be
done it jumps to the next arrival. Handing requests in is left out, which a server does on another thread. With more
threads the clock is wall time, and the machine must be quiet.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from llmc.buckets.bucket import Bucket
from llmc.buckets.cost_table import CostTable, ReplayCost
from llmc.buckets.step_cost import StepCosts
from llmc.buckets.trace import Trace, read_trace
from llmc.cli.simulation import WhatIf, artifact_ladder, percentile
from llmc.runtime.binding import Artifact, Engine
from llmc.runtime.device import PADDING, machine_facts
from llmc.runtime.engine import SamplingParams
from llmc.runtime.overhead import measure_overhead
from llmc.runtime.warmup import WarmPlan, WarmUp

Clock = Callable[[], int]  # nanoseconds
Figures = dict[str, float]


class Timed:
    """The engine's warm-up by another clock."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine, self._clock = engine, clock
        self.walk_graph, self.enable_graph = engine.walk_graph, engine.enable_graph

    def warm_load(self, graph: int, num_seqs: int, tokens_each: int, context: int) -> int:
        begin = self._clock()
        self._engine.warm_load(graph, num_seqs, tokens_each, context)
        return self._clock() - begin


def measured(artifact: Artifact, engine: Engine, seconds: float, clock: Clock) -> CostTable:
    """A cost table of all graphs, and of the engine's own time."""
    info, graphs = artifact.info, artifact.graphs()
    plan = replace(WarmPlan.of_all(graphs), measure=frozenset(range(len(graphs))), measure_s=seconds)
    costs: list[ReplayCost] = []
    warming = WarmUp(Timed(engine, clock), graphs, plan, block_size=info.block_size, max_model_len=info.max_model_len)

    def take(step: Any) -> None:
        bucket = Bucket(step.graph.phase, step.graph.batch, step.graph.seq)
        for one in step.measured:
            tokens = one.load.num_seqs * one.load.tokens_each
            costs.append(ReplayCost(bucket, one.load.num_seqs, tokens, one.load.context, one.seconds, one.repeats))

    warming.run(take)
    step_s, token_s = measure_overhead(engine, info.max_num_seqs)
    facts = machine_facts(engine.stats.num_threads)
    return CostTable(facts, "0" * 64, tuple(costs), PADDING, step_s, token_s)


def mean_of(tables: list[CostTable]) -> CostTable:
    """The costs of tables of the same loads, averaged."""
    loads = [{cost.load: cost for cost in table.costs} for table in tables]
    costs = [
        replace(cost, seconds=statistics.fmean(other[load].seconds for other in loads))
        for load, cost in loads[0].items()
    ]
    step_s, token_s = (statistics.fmean(getattr(table, name) for table in tables) for name in ("step_s", "token_s"))
    return replace(tables[0], costs=tuple(costs), step_s=step_s, token_s=token_s)


def serve(engine: Engine, trace: Trace, what_if: WhatIf, clock: Clock) -> Figures:
    """The requests by the clock, which idle time does not pass on."""
    rng = np.random.default_rng(0)
    arrivals = trace.arrival_s / what_if.speed
    prompts = [rng.integers(0, 256, n).astype(np.int32) for n in what_if.prompts.tolist()]
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in what_if.outputs.tolist()]
    index_of: dict[int, int] = {}
    ttft, total = np.full(len(trace), np.nan), np.full(len(trace), np.nan)
    before, start, skipped_s, next_one, done = engine.graph_stats(), clock(), 0.0, 0, 0
    while done < len(trace):
        now = (clock() - start) / 1e9 + skipped_s
        handing_in = clock()
        while next_one < len(trace) and arrivals[next_one] <= now:
            index_of[engine.submit(prompts[next_one], params[next_one])] = next_one
            next_one += 1
        start += clock() - handing_in
        if not engine.step() and next_one < len(trace):
            skipped_s += max(0.0, arrivals[next_one] - ((clock() - start) / 1e9 + skipped_s))
        events = engine.poll()
        now = (clock() - start) / 1e9 + skipped_s
        for event in events:
            index = index_of[event.request_id]
            if event.kind == "token" and np.isnan(ttft[index]):
                ttft[index] = now - arrivals[index]
            if event.kind == "finished":
                done += 1
                total[index] = now - arrivals[index]
    busy_s = (clock() - start) / 1e9
    used = [
        (b.replays - a.replays, b.padded_tokens - a.padded_tokens)
        for a, b in zip(before, engine.graph_stats(), strict=True)
    ]
    return figures(what_if, ttft, total, busy_s, used)


def figures(what_if: WhatIf, ttft: Any, total: Any, busy_s: float, used: list[tuple[int, int]]) -> Figures:
    """By name, as the table shows them. used: replays and padded rows of each graph."""
    return {
        "busy, s": busy_s,
        "tokens a busy second": float((what_if.prompts + what_if.outputs).sum()) / busy_s,
        "request p50, s": percentile(total, 50),
        "request mean, s": float(np.mean(total)),
        "request p99, s": percentile(total, 99),
        "first token p50, s": percentile(ttft, 50),
        "first token mean, s": float(np.mean(ttft)),
        "first token p99, s": percentile(ttft, 99),
        "steps": sum(replays for replays, _ in used),
        "padded rows": sum(rows for _, rows in used),
    }


def predicted(what_if: WhatIf, path: Path) -> tuple[Figures, list[int]]:
    """The same figures by the simulation, and the replays of each graph."""
    one = what_if.run(artifact_ladder(path)[0])
    rows = [0.0] * len(one.graphs)
    for load in one.loads:
        rows[load.graph] += load.tokens
    used = [
        (g.replays, int(g.replays * g.bucket.max_tokens - tokens)) for g, tokens in zip(one.graphs, rows, strict=True)
    ]
    return figures(what_if, one.ttft_s, one.total_s, one.busy_s, used), [g.replays for g in one.graphs]


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
    rounds: list[tuple[Figures, Figures]] = []
    speed = 0.0
    with Artifact(args.artifact) as artifact:
        for _ in range(args.rounds):
            with Engine(artifact, num_threads=args.threads, pin_threads=0) as engine:
                tables = [measured(artifact, engine, args.seconds, clock)]
                costs = StepCosts.of_table(tables[0], "measured")
                if not speed:
                    flat_out = WhatIf(trace, server, costs, speed=1e9).run(ladder)
                    speed = float(trace.arrival_s[-1]) * args.load / flat_out.busy_s
                what_if = WhatIf(trace, server, costs, speed=speed)
                before = engine.graph_stats()
                real = serve(engine, trace, what_if, clock)
                ran = [b.replays - a.replays for a, b in zip(before, engine.graph_stats(), strict=True)]
                tables.append(measured(artifact, engine, args.seconds, clock))
            costs = StepCosts.of_table(mean_of(tables), "measured")
            guess, replays = predicted(replace(what_if, costs=costs), args.artifact)
            guess["steps in the same graph"] = sum(map(min, replays, ran))
            real["steps in the same graph"] = sum(ran)
            rounds.append((guess, real))
    rows = {}
    for name in rounds[0][1]:
        errors = [guess[name] / real[name] - 1 if real[name] else 0.0 for guess, real in rounds]
        rows[name] = {
            "predicted": statistics.median(guess[name] for guess, _ in rounds),
            "real": statistics.median(real[name] for _, real in rounds),
            "error": statistics.median(errors),
            "worst": max(errors, key=abs),
        }
    if args.json:
        print(json.dumps({"speed": speed, "rounds": args.rounds, "figures": rows}, indent=2))
        return
    print(f"{len(trace)} requests at {speed:.3g} times the pace of the trace, {args.threads} threads")
    print(f"{'':24} {'predicted':>12} {'real':>12} {'error':>8} {'worst':>8}")
    for name, row in rows.items():
        print(f"{name:24} {row['predicted']:12.5g} {row['real']:12.5g} {row['error']:+8.1%} {row['worst']:+8.1%}")


if __name__ == "__main__":
    main()
