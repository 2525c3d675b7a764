"""`llmc bench latency` and `llmc bench throughput`: the engine alone, driven in this process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmc.cli.render.bench import print_spreads, write_result
from llmc.output_path import check_outputs
from llmc.runtime.binding import Artifact, Engine
from llmc.runtime.loadgen.answer import Outcome
from llmc.runtime.loadgen.buckets import BucketUse, of_engine, used_between
from llmc.runtime.loadgen.drive import drive
from llmc.runtime.loadgen.error import BenchError
from llmc.runtime.loadgen.measure import Report, Spread, report
from llmc.runtime.loadgen.workload import Lengths, RandomTokens
from llmc.runtime.report.page import write_page


@dataclass(frozen=True)
class OfflineOptions:
    """Options of the commands; lengths in tokens.

    kind: "latency" or "throughput". num_prompts: requests per run. concurrency: most requests at once; 0: all.
    warmup, repeats: numbers of untimed and of timed runs. threads, kv_bytes, num_states: 0 for the engine's default.
    weight_memory: as in `Engine`.
    """

    artifact: Path
    kind: str
    num_prompts: int
    input_len: int
    output_len: int
    range_ratio: float
    concurrency: int
    warmup: int
    repeats: int
    threads: int
    kv_bytes: int
    num_states: int
    weight_memory: str
    seed: int


def bench_offline(options: OfflineOptions, output: Path | None, *, as_json: bool, html: Path | None = None) -> None:
    """Runs the benchmark, prints its result and writes it to `output` (JSON) and `html`. Raises BenchError, or an error
    of the artifact or engine."""
    check_outputs({"--output": output, "--html": html})
    with Artifact(options.artifact) as artifact:
        info = artifact.info
        longest = options.input_len + options.output_len
        if longest > info.max_model_len:
            raise BenchError(
                f"{options.input_len} prompt and {options.output_len} output tokens exceed max-model-len "
                f"{info.max_model_len}: shorten them, or compile with a larger --max-model-len"
            )
        lengths = Lengths.uniform(
            options.num_prompts, options.input_len, options.output_len, options.range_ratio, options.seed
        ).clipped(info.max_model_len)
        # Every run has its own seed; else the prefix cache would hold the prompts of all runs but the first.
        runs = [
            RandomTokens(lengths, info.vocab_size, seed=options.seed + number)
            for number in range(options.warmup + options.repeats)
        ]
        concurrency = options.concurrency or options.num_prompts
        with Engine(
            artifact,
            num_threads=options.threads,
            kv_bytes=options.kv_bytes,
            num_states=options.num_states,
            weight_memory=options.weight_memory,
        ) as engine:
            found = []
            before: list[BucketUse] = []
            for number, run in enumerate(runs):
                if number == options.warmup:
                    before = of_engine(artifact.graphs(), engine.graph_stats())
                outcomes = drive(engine, [run.ask(i) for i in range(len(run))], concurrency)
                if number >= options.warmup:
                    found.append(outcomes)
            stats = engine.stats
            buckets = used_between(before, of_engine(artifact.graphs(), engine.graph_stats())) or []
    reports = [report(outcomes) for outcomes in found]
    together = _spreads(reports, [outcome for outcomes in found for outcome in outcomes])
    result = {
        "settings": asdict(options) | {"artifact": str(options.artifact)},
        "threads": stats.device.get("threads", 0),
        "preemptions": stats.num_preemptions,
        "bucket_misses": stats.num_bucket_misses,
        **{name: None if spread is None else asdict(spread) for name, spread in together.items()},
        "buckets": [asdict(use) for use in buckets],
        "runs": [one.as_dict() for one in reports],
    }
    if output is not None:
        write_result(output, result)
    if html is not None:
        write_page(_html(options, result, found), html)
    if as_json:
        print(json.dumps(result, indent=2))
        return
    print(
        f"{options.num_prompts} requests of {options.input_len} + {options.output_len} tokens, {concurrency} at once, "
        f"{stats.device.get('threads', 0)} threads, {options.repeats} runs after {options.warmup} for warming up\n"
    )
    rates = ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s")
    if options.kind == "latency":
        print_spreads({"run": together["run_ms"]}, "ms")
    else:
        print_spreads({name.removesuffix("_per_s").replace("_", " "): together[name] for name in rates}, "per second")
    print()
    print_spreads({name: together[f"{name.lower()}_ms"] for name in ("TTFT", "TPOT", "E2E")}, "ms")
    if html is not None:
        print(f"\nwrote {html}")


def _html(options: OfflineOptions, result: Mapping[str, Any], found: Sequence[list[Outcome]]) -> str:
    from llmc.runtime.loadgen.html import bench_html

    every = report([outcome for outcomes in found for outcome in outcomes]).as_dict()
    # Rates are means over runs: in the report of all requests together, pauses between runs would count.
    rates = ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s")
    means = {name: result[name]["mean"] for name in rates}
    runs = f"{options.repeats} run{'s' if options.repeats > 1 else ''} after {options.warmup} for warming up"
    lead = (
        f"{options.artifact.resolve().name}: {options.num_prompts} requests of {options.input_len} + "
        f"{options.output_len} tokens, {result['threads']} threads, {runs}; over time: the last run."
    )
    title = f"{'Latency' if options.kind == 'latency' else 'Throughput'} of the engine"
    return bench_html(title, lead, result, every | means, [o for outcomes in found for o in outcomes], last=found[-1])


def _spreads(reports: Sequence[Report], outcomes: Sequence[Outcome]) -> dict[str, Spread | None]:
    """Spreads of run_ms and rates over the runs, and of latencies over all their requests."""
    every = report(outcomes)
    return {
        "run_ms": Spread.of(one.duration_s * 1e3 for one in reports),
        "requests_per_s": Spread.of(one.requests_per_s for one in reports),
        "output_tokens_per_s": Spread.of(one.output_tokens_per_s for one in reports),
        "total_tokens_per_s": Spread.of(one.total_tokens_per_s for one in reports),
        "ttft_ms": every.ttft_ms,
        "tpot_ms": every.tpot_ms,
        "e2e_ms": every.e2e_ms,
    }
