"""`llmc buckets scale`: a trace on several ranks, stages and replicas, before there are so many machines."""

# ruff: noqa: B008 (typer declares options as argument defaults)
from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from llmc.cli.options.numbers import finite

if TYPE_CHECKING:
    from llmc.runtime.simulation.scaling import Scaled

SCALE_HELP = """Predict what several ranks, stages and replicas make of a trace: latencies, tokens a second, and the
share of time that goes to messages between ranks.

An arrangement is ranks x stages x replicas: 8x4x2 has 2 replicas of 4 stages, of 8 ranks each. The trace runs through
the real scheduler of each replica, in virtual time. Costs of a step are those of one rank, divided; messages are added
from the properties of the link. Give --cost-table for measured costs. Without one they come from a roofline of --model.

\b
Examples:
  llmc buckets scale --trace trace.jsonl --buckets llama.llmc --model models/llama --ranks 1 --ranks 8 --ranks 8x1x4
  llmc buckets scale --trace trace.csv --buckets "prefill=1x512:512:4096,decode=1:8:64x4096" --model models/llama-70b \\
    --gflops 40000 --bandwidth 300 --ranks 8 --ranks 8x4 --ranks 8x1x32 --latency-us 5 --gbps 100
  llmc buckets scale --trace trace.jsonl --buckets llama.llmc --cost-table costs.json --model models/llama --ranks 2
"""
_PERCENTS = (50, 99)
_TIMES = {"ttft_s": "first token", "token_s": "next token"}


def scale_command(
    trace: Path = typer.Option(..., metavar="FILE", help="Trace of requests, plain or .gz; -: stdin."),
    buckets: str = typer.Option(..., metavar="SPEC|FILE|ARTIFACT", help="Ladder: spec, bucket file or artifact."),
    model: Path = typer.Option(..., metavar="DIR", help="Model whose config.json tells what there is to divide."),
    ranks: list[str] = typer.Option(
        ..., metavar="RANKS", help="Arrangement: ranks x stages x replicas; repeat to compare several."
    ),
    cost_table: Path | None = typer.Option(
        None, metavar="FILE|ARTIFACT", help="Costs of one rank: a table, or an artifact that llmc warmup measured."
    ),
    gflops: float = typer.Option(1000.0, min=1e-3, callback=finite, help="Arithmetic of a rank, in GFLOP/s."),
    bandwidth: float = typer.Option(50.0, min=1e-3, callback=finite, help="Memory bandwidth of a rank, in GB/s."),
    undivided_us: float = typer.Option(
        50.0, min=0, callback=finite, help="Part of a step that ranks do not divide, in microseconds."
    ),
    latency_us: float = typer.Option(
        10.0, min=0, callback=finite, help="Until a short message of another rank has come, in microseconds."
    ),
    message_us: float = typer.Option(
        1.0, min=0, callback=finite, help="Each further message that a rank sends at once, in microseconds."
    ),
    gbps: float = typer.Option(25.0, min=1e-3, callback=finite, help="Link of each rank, in Gbit/s."),
    steps_in_flight: int = typer.Option(
        0, min=0, max=64, metavar="N", help="Steps that stages work on at a time; 0: as many as stages."
    ),
    bus_share: float = typer.Option(
        0.0,
        min=0,
        max=1,
        callback=finite,
        help="What a stage takes of a memory bus of all stages while it reads, 0 to 1; 0: each has its own.",
    ),
    max_model_len: int | None = typer.Option(
        None, min=2, metavar="N", help="Longest prompt plus output; default: the limit of the ladder."
    ),
    max_num_seqs: int | None = typer.Option(
        None, min=1, metavar="N", help="Sequences per step of a replica; default: the largest decode batch."
    ),
    block_size: int | None = typer.Option(None, min=1, metavar="N", help="Tokens per KV block; default: 32."),
    num_blocks: int = typer.Option(
        0, min=0, metavar="N", help="KV blocks of a replica; 0: enough for all sequences, or 1 GiB."
    ),
    speed: float = typer.Option(1.0, min=1e-6, callback=finite, help="Factor for the arrival rate."),
    limit: int = typer.Option(0, min=0, metavar="N", help="Use only the first N requests; 0: all."),
    as_json: bool = typer.Option(False, "--json", help="Print the figures as JSON on stdout."),
) -> None:
    from llmc.buckets.arrangement import Arrangement, DividedModel, Link
    from llmc.buckets.bucket import BucketError
    from llmc.buckets.cost import ModelShape
    from llmc.buckets.model_config import read_config
    from llmc.buckets.trace import read_trace
    from llmc.cli.buckets_simulate import costs_of, ladders_of, progress_bar
    from llmc.manifest import read_manifest
    from llmc.runtime.simulation.scaling import Stages, scaled
    from llmc.runtime.simulation.what_if import WhatIf

    shape = ModelShape.from_config(read_config(model), str(model / "config.json"))
    link = Link(latency_us * 1e-6, message_us * 1e-6, gbps * 1e9 / 8)
    models = [DividedModel(shape, Arrangement.parse(text), link, undivided_us * 1e-6) for text in ranks]
    for one in models:
        one.check()
    if cost_table is not None and cost_table.is_dir():
        manifest = read_manifest(cost_table)
        if "tensor_parallel" in manifest or "pipeline_parallel" in manifest:
            raise BucketError(f"{cost_table} runs on several ranks: give costs of one rank, which are divided here")
    requests = read_trace(trace)
    if limit:
        requests = requests.first(limit)
    (ladder,), server = ladders_of([buckets], max_num_seqs, max_model_len, block_size)
    server = replace(server, num_blocks=num_blocks)
    costs, _ = costs_of([ladder], cost_table, None if cost_table else model, gflops, bandwidth, undivided_us, 1.0, 1.0)
    what_if = WhatIf(requests, server, costs, speed=speed)
    server.check(ladder)
    with progress_bar() as progress:
        stages = Stages(steps_in_flight, bus_share)
        found = [scaled(what_if, ladder, one, progress, stages) for one in models]
    if as_json:
        print(json.dumps(_data(what_if.trace.name, costs.source, found), indent=2))
        return
    _print(f"{what_if.trace.name}: {len(requests):,} requests; costs of one rank {costs.source}", found)


def _of_first(found: Sequence[Scaled]) -> list[tuple[float, float]]:
    """(tokens per second, tokens per second and rank) of each arrangement, as multiples of the first one's."""
    first = found[0]
    gains = [one.tokens_per_s / first.tokens_per_s if first.tokens_per_s else 0.0 for one in found]
    sizes = [one.arrangement.processes / first.arrangement.processes for one in found]
    return [(gain, gain / size) for gain, size in zip(gains, sizes, strict=True)]


def _data(trace: str, costs: str, found: Sequence[Scaled]) -> dict[str, Any]:
    return {
        "trace": trace,
        "costs": costs,
        "arrangements": [
            {
                "ranks": one.arrangement.ranks,
                "stages": one.arrangement.stages,
                "replicas": one.arrangement.replicas,
                **{
                    f"{name.removesuffix('_s')}_p{percent}_s": one.percentile_of(name, percent)
                    for name in _TIMES
                    for percent in _PERCENTS
                },
                "tokens_per_s": one.tokens_per_s,
                "of_first": gain,
                "of_first_per_rank": each,
                "message_share": one.message_share,
            }
            for one, (gain, each) in zip(found, _of_first(found), strict=True)
        ],
    }


def _print(headline: str, found: Sequence[Scaled]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from llmc.cli.render.console import Console
    from llmc.cli.render.tables import print_table
    from llmc.runtime.simulation.figures import count, duration

    console = Console(file=sys.stdout)
    console.print(headline, highlight=False)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    times = [f"{words} p{percent}" for words in _TIMES.values() for percent in _PERCENTS]
    table.add_column("arrangement")
    for title in ("ranks", *times, "tok/s, all at once", "of the first", "each rank", "messages"):
        table.add_column(title, justify="right")
    for one, (gain, each) in zip(found, _of_first(found), strict=True):
        latencies = [duration(one.percentile_of(name, percent)) for name in _TIMES for percent in _PERCENTS]
        table.add_row(
            str(one.arrangement), count(one.arrangement.processes), *latencies, count(one.tokens_per_s),
            f"{gain:.3g}", f"{each:.0%}", f"{one.message_share:.1%}",
        )  # fmt: skip
    print_table(table, console)
