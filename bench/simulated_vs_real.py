"""Holds `llmc buckets simulate` to the truth: a trace through an artifact for real, beside its prediction.

    python bench/simulated_vs_real.py ARTIFACT TRACE [--requests 400] [--scale 0.25] [--load 0.3] [--threads 1]

Costs are measured as `llmc warmup` does, then the requests are served in real time, greedily, with made-up tokens.
--scale shortens prompts and outputs to the model's context; --load sets the pace of arrivals, so that the prediction
is busy for such a share of the time. Prints a table of predicted and real figures; --json prints them for machines.
With one thread, "busy, CPU s" leaves out the time that other programs held the CPU: where it is much less than busy,
the machine was not quiet, and real latencies are longer than they would be.
"""

from __future__ import annotations

import argparse
import json
import time
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


def measured(artifact: Artifact, engine: Engine, seconds: float) -> CostTable:
    """A cost table of all graphs, and of the engine's own time."""
    info, graphs = artifact.info, artifact.graphs()
    plan = replace(WarmPlan.of_all(graphs), measure=frozenset(range(len(graphs))), measure_s=seconds)
    costs: list[ReplayCost] = []
    warming = WarmUp(engine, graphs, plan, block_size=info.block_size, max_model_len=info.max_model_len)

    def take(step: Any) -> None:
        bucket = Bucket(step.graph.phase, step.graph.batch, step.graph.seq)
        for one in step.measured:
            tokens = one.load.num_seqs * one.load.tokens_each
            costs.append(ReplayCost(bucket, one.load.num_seqs, tokens, one.load.context, one.seconds, one.repeats))

    warming.run(take)
    step_s, token_s = measure_overhead(engine, info.max_num_seqs)
    facts = machine_facts(engine.stats.num_threads)
    return CostTable(facts, "0" * 64, tuple(costs), PADDING, step_s, token_s)


def serve(engine: Engine, trace: Trace, what_if: WhatIf) -> dict[str, float]:
    """The requests in real time."""
    rng = np.random.default_rng(0)
    arrivals = trace.arrival_s / what_if.speed
    prompts = [rng.integers(0, 256, n).astype(np.int32) for n in what_if.prompts.tolist()]
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in what_if.outputs.tolist()]
    index_of: dict[int, int] = {}
    ttft, total = np.full(len(trace), np.nan), np.full(len(trace), np.nan)
    before, start, next_one, done = engine.stats, time.monotonic_ns(), 0, 0
    idle_s, cpu = 0.0, time.process_time()
    while done < len(trace):
        now = (time.monotonic_ns() - start) / 1e9
        while next_one < len(trace) and arrivals[next_one] <= now:
            index_of[engine.submit(prompts[next_one], params[next_one])] = next_one
            next_one += 1
        if not engine.step() and next_one < len(trace):
            pause = time.monotonic_ns()
            time.sleep(max(0.0, min(arrivals[next_one] - (pause - start) / 1e9, 0.05)))
            idle_s += (time.monotonic_ns() - pause) / 1e9
        for event in engine.poll():
            if event.kind == "finished":
                index = index_of[event.request_id]
                done += 1
                ttft[index] = (event.first_token_ns - start) / 1e9 - arrivals[index]
                total[index] = (event.time_ns - start) / 1e9 - arrivals[index]
    after, cpu = engine.stats, time.process_time() - cpu
    return figures(
        ttft,
        total,
        (after.replay_ns - before.replay_ns) / 1e9,
        (time.monotonic_ns() - start) / 1e9 - idle_s,
        cpu,
        after.num_prefill_steps - before.num_prefill_steps,
        after.num_decode_steps - before.num_decode_steps,
        after.padded_tokens - before.padded_tokens,
    )


def figures(
    ttft: Any, total: Any, replay_s: float, busy_s: float, cpu_s: float, prefills: int, decodes: int, padded: int
) -> dict[str, float]:
    """By name, as the table shows them."""
    return {
        "replays, s": replay_s,
        "busy, s": busy_s,
        "busy, CPU s": cpu_s,
        "first token p50, s": percentile(ttft, 50),
        "first token p99, s": percentile(ttft, 99),
        "request p50, s": percentile(total, 50),
        "request p99, s": percentile(total, 99),
        "prefill steps": prefills,
        "decode steps": decodes,
        "padded rows": padded,
    }


def predicted(what_if: WhatIf, path: Path) -> dict[str, float]:
    """The same figures by the simulation."""
    one = what_if.run(artifact_ladder(path)[0])
    steps = {phase: sum(use.replays for use in one.of_phase(phase)) for phase in one.phases}
    rows = sum(
        use.replays * use.bucket.max_tokens - sum(load.tokens for load in one.loads if load.graph == index)
        for index, use in enumerate(one.graphs)
    )
    return figures(
        one.ttft_s,
        one.total_s,
        one.seconds,
        one.busy_s,
        one.busy_s,
        steps["prefill"],
        steps["decode"],
        int(rows),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--scale", type=float, default=0.25)
    parser.add_argument("--load", type=float, default=0.3)
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
    server = artifact_ladder(args.artifact)[1]
    with Artifact(args.artifact) as artifact, Engine(artifact, num_threads=args.threads, pin_threads=0) as engine:
        table = measured(artifact, engine, args.seconds)
        costs = StepCosts.of_table(table, "measured")
        flat_out = WhatIf(trace, server, costs, speed=1e9).run(artifact_ladder(args.artifact)[0])
        what_if = WhatIf(trace, server, costs, speed=float(trace.arrival_s[-1]) * args.load / flat_out.busy_s)
        guess = predicted(what_if, args.artifact)
        real = serve(engine, trace, what_if)
        again = StepCosts.of_table(measured(artifact, engine, args.seconds), "measured again")
    after = predicted(replace(what_if, costs=again), args.artifact)
    if args.json:
        data = {"predicted": guess, "real": real, "predicted_after": after, "step_s": table.step_s}
        print(json.dumps(data | {"token_s": table.token_s, "speed": what_if.speed}, indent=2))
        return
    print(f"{len(trace)} requests at {what_if.speed:.3g} times the pace of the trace, {args.threads} threads")
    print(f"{'':20} {'predicted':>12} {'real':>12} {'error':>8} {'by costs measured afterwards':>30}")
    for name, value in real.items():
        error, late = ((x / value - 1) * 100 if value else 0.0 for x in (guess[name], after[name]))
        print(f"{name:20} {guess[name]:12.5g} {value:12.5g} {error:+7.1f}% {after[name]:12.5g} {late:+7.1f}%")


if __name__ == "__main__":
    main()
