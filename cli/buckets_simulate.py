"""`llmc buckets simulate`: simulates a trace with several ladders."""

# ruff: noqa: B008 (typer declares options as argument defaults)
from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from llmc.buckets import BucketError, Limits, parse_spec
from llmc.buckets.cost_bounds import CONFIDENCE
from llmc.buckets.verify_buckets import DEFAULT_ODDS, MAX_GUESSES
from llmc.cli.options.acceptance import acceptance_odds
from llmc.cli.options.numbers import finite
from llmc.output_path import check_outputs

if TYPE_CHECKING:
    from llmc.buckets.planner import Resources
    from llmc.buckets.step_cost import StepCosts
    from llmc.runtime.simulation.what_if import Ladder, OnProgress, Outcome, Server, WhatIf

SIMULATE_HELP = """Try ladders of buckets on a trace. Figures are padding in tokens and time, graphs, compile and
warm-up time, memory, misses, and added latency. The latter compares with a ladder that has a graph for exactly every
shape.

The trace runs through the real scheduler and block manager, in virtual time. Nothing is computed: a step takes the cost
of its bucket. Costs come from --cost-table, else from the measurements of llmc warmup for the first artifact among the
ladders. Without either, they come from a roofline of --model, or from --prefill-rate and --decode-step-ms.

\b
Examples:
  llmc buckets simulate --trace trace.jsonl --buckets qwen.llmc
  llmc buckets simulate --trace trace.jsonl --buckets qwen.llmc --buckets planned.toml --html report.html
  llmc buckets simulate --trace trace.csv --buckets "prefill=1x256:256:4096,decode=1:8:32x512:512:4096" --model llama
  llmc buckets simulate --trace trace.csv --buckets a.toml --buckets b.toml --speed 2 --png report.png --json
  llmc buckets simulate --trace trace.jsonl --buckets qwen.llmc --speculate 7 --acceptance metrics.txt
"""
_LONGEST_NAME = 24


def simulate_command(
    trace: Path = typer.Option(..., metavar="FILE", help="Trace of requests, plain or .gz; -: stdin."),
    buckets: list[str] = typer.Option(
        ..., metavar="SPEC|FILE|ARTIFACT", help="Ladder: spec, bucket file or artifact; repeat to compare several."
    ),
    cost_table: Path | None = typer.Option(
        None, metavar="FILE|ARTIFACT", help="Cost table, or artifact that llmc warmup measured."
    ),
    model: Path | None = typer.Option(None, metavar="DIR", help="Model whose config.json gives a roofline."),
    gflops: float = typer.Option(
        1000.0, min=1e-3, callback=finite, help="Arithmetic of the machine for --model, in GFLOP/s."
    ),
    bandwidth: float = typer.Option(
        50.0, min=1e-3, callback=finite, help="Memory bandwidth of the machine for --model, in GB/s."
    ),
    overhead_us: float = typer.Option(
        50.0, min=0, callback=finite, help="Fixed time of a replay for --model, microseconds."
    ),
    prefill_rate: float = typer.Option(
        20000.0, min=1e-3, metavar="X", callback=finite, help="Assumed prefill speed, in tokens/s."
    ),
    decode_step_ms: float = typer.Option(
        20.0, min=1e-6, metavar="MS", callback=finite, help="Assumed time of a decode step."
    ),
    max_model_len: int | None = typer.Option(
        None,
        min=2,
        metavar="N",
        help="Longest prompt plus output; default: the limit of all ladders. Longer requests are clipped.",
    ),
    max_num_seqs: int | None = typer.Option(
        None, min=1, metavar="N", help="Sequences per step; default: the largest decode batch."
    ),
    block_size: int | None = typer.Option(None, min=1, metavar="N", help="Tokens per KV block; default: 32."),
    num_blocks: int = typer.Option(0, min=0, metavar="N", help="KV blocks; 0: enough for all sequences, or 1 GiB."),
    max_prefill_tokens: int = typer.Option(0, min=0, metavar="N", help="Tokens per prefill step; 0: as many as fit."),
    prefix_cache: bool = typer.Option(True, "--prefix-cache/--no-prefix-cache", help="Reuse common prefixes."),
    strict: bool = typer.Option(False, "--strict", help="Fail requests that miss instead of using a larger graph."),
    speculate: int = typer.Option(0, min=0, max=MAX_GUESSES, metavar="N", help="Guesses per sequence and decode step."),
    acceptance: str = typer.Option(
        f"{DEFAULT_ODDS:g}",
        metavar="X|FILE",
        help="Probability that a guess is right if those before it are, or saved /metrics of a server that measured.",
    ),
    draft_us: float = typer.Option(
        0.0, min=0, callback=finite, help="Until a draft has guessed a token of each sequence, in microseconds."
    ),
    speed: float = typer.Option(1.0, min=1e-6, callback=finite, help="Factor for the arrival rate."),
    limit: int = typer.Option(0, min=0, metavar="N", help="Use only the first N requests; 0: all."),
    html: Path | None = typer.Option(None, metavar="FILE", help="Write a report with heat maps to FILE."),
    png: Path | None = typer.Option(None, metavar="FILE", help="Write the report as a picture; needs Chromium."),
    as_json: bool = typer.Option(False, "--json", help="Print the figures as JSON on stdout."),
) -> None:
    from llmc.buckets.trace import read_trace
    from llmc.runtime.simulation.what_if import WhatIf

    check_outputs({"--html": html, "--png": png})
    requests = read_trace(trace)
    if limit:
        requests = requests.first(limit)
    ladders, server = ladders_of(buckets, max_num_seqs, max_model_len, block_size)
    server = replace(
        server,
        num_blocks=num_blocks,
        max_prefill_tokens=max_prefill_tokens,
        prefix_cache=prefix_cache,
        strict=strict,
        guesses=speculate,
        odds=acceptance_odds(acceptance) if speculate else 0.0,
        draft_s=draft_us * 1e-6,
    )
    costs, resources = costs_of(
        ladders, cost_table, model, gflops, bandwidth, overhead_us, prefill_rate, decode_step_ms
    )
    what_if = WhatIf(requests, server, costs, resources, speed)
    for ladder in ladders:
        server.check(ladder)
    with progress_bar() as progress:
        outcomes = [what_if.run(ladder, progress) for ladder in ladders]
    if html is not None or png is not None:
        from llmc.runtime.simulation.report import report_html, write_report

        page = report_html(what_if, outcomes, simulation_data(what_if, outcomes))
        write_report(page, html, png)
    if as_json:
        print(json.dumps(simulation_data(what_if, outcomes), indent=2))
        return
    _print(what_if, outcomes)
    for path in (html, png):
        if path is not None:
            print(f"wrote {path}")


def ladders_of(
    texts: list[str], max_num_seqs: int | None, max_model_len: int | None, block_size: int | None
) -> tuple[list[Ladder], Server]:
    """The ladders, under distinct names, and a server that fits all of them."""
    from llmc.runtime.simulation.what_if import Ladder, Server, artifact_ladder

    artifacts = {text: artifact_ladder(Path(text)) for text in texts if Path(text).is_dir()}
    built_for = [server for _, server in artifacts.values()]
    if block_size is None:
        block_size = built_for[0].block_size if built_for else 32
    for text, (_, server) in artifacts.items():
        for name, value, most in (
            ("--max-model-len", max_model_len, server.max_model_len),
            ("--max-num-seqs", max_num_seqs, server.max_num_seqs),
        ):
            if value is not None and value > most:
                raise BucketError(f"{name} {value} is more than the {most} that {text} was compiled for: lower it")
        if server.block_size != block_size:
            raise BucketError(
                f"{text} has KV blocks of {server.block_size} tokens, not {block_size}: give --block-size"
            )
    limits = Limits(
        max_num_seqs if max_num_seqs is not None else min((s.max_num_seqs for s in built_for), default=None),
        max_model_len if max_model_len is not None else min((s.max_model_len for s in built_for), default=None),
        block_size,
    )
    ladders = []
    for number, text in enumerate(texts, 1):
        if text in artifacts:
            ladders.append(artifacts[text][0])
        else:
            is_file = Path(text).suffix in (".toml", ".json", ".txt")
            name = Path(text).stem if is_file else text if len(text) <= _LONGEST_NAME else f"ladder {number}"
            ladders.append(Ladder(name, tuple(sorted(parse_spec(text, limits))), text))
    counts: dict[str, int] = {}
    for index, ladder in enumerate(ladders):
        counts[ladder.name] = counts.get(ladder.name, 0) + 1
        if counts[ladder.name] > 1:
            ladders[index] = replace(ladder, name=f"{ladder.name} ({counts[ladder.name]})")
    decodes = [[b for b in ladder.buckets if b.phase == "decode"] for ladder in ladders]
    for ladder, decode in zip(ladders, decodes, strict=True):
        if not decode:
            raise BucketError(f"{ladder.name} has no decode bucket: add one")
    server = Server(
        max_model_len=limits.max_model_len or min(max(b.seq for b in decode) for decode in decodes),
        max_num_seqs=limits.max_num_seqs or max(b.batch for decode in decodes for b in decode),
        block_size=block_size,
        kv_block_bytes=built_for[0].kv_block_bytes if built_for else 1,
        state_bytes=built_for[0].state_bytes if built_for else 0,
    )
    return ladders, server


def costs_of(
    ladders: list[Ladder],
    table: Path | None,
    model: Path | None,
    gflops: float,
    bandwidth: float,
    overhead_us: float,
    prefill_rate: float,
    decode_step_ms: float,
) -> tuple[StepCosts, Resources]:
    from llmc.buckets.cost import FlopsCost, ModelShape
    from llmc.buckets.model_config import read_config
    from llmc.buckets.planner import Resources
    from llmc.buckets.step_cost import AssumedCost, StepCosts
    from llmc.compiler.compile_times import learned
    from llmc.runtime.warm_up.cost_tables import measured_table, step_costs

    resources = learned(Resources())
    shape = ModelShape.from_config(read_config(model), str(model / "config.json")) if model is not None else None
    if shape is not None:
        resources = replace(resources, bytes_per_token=shape.arena_bytes_per_token)
    for ladder in ladders:
        if ladder.arena_bytes is not None:
            rows = max(bucket.max_tokens for bucket in ladder.buckets)
            resources = replace(resources, bytes_per_token=ladder.arena_bytes / rows)
            break
    if table is not None:
        return step_costs(table), resources
    if shape is not None and model is not None:
        roofline = FlopsCost(shape, gflops * 1e9, bandwidth * 1e9, overhead_us * 1e-6)
        source = f"a roofline of {model.name}, {gflops:g} GFLOP/s and {bandwidth:g} GB/s"
        return StepCosts.of_model(roofline, source), resources
    for ladder in ladders:
        if ladder.path is not None:
            return StepCosts.of_table(measured_table(ladder.path), f"measured, {ladder.name}"), resources
    source = f"assumed, {prefill_rate:,.0f} tokens of prompts a second and {decode_step_ms:g} ms a decode step"
    return StepCosts.of_model(AssumedCost(prefill_rate, decode_step_ms / 1000), source), resources


@contextmanager
def progress_bar() -> Iterator[OnProgress]:
    """One bar per run on stderr; nothing if stderr is no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from llmc.cli.render.console import Console

    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<24.24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def update(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done)

        yield update


def simulation_data(what_if: WhatIf, outcomes: list[Outcome]) -> dict[str, Any]:
    """All figures, for machines; times in seconds, shares 0 … 1."""
    from llmc.runtime.simulation.what_if import percentile

    trace, server = what_if.trace, what_if.server
    return {
        "trace": trace.name,
        "requests": len(trace),
        "clipped": what_if.clipped,
        "costs": what_if.costs.source,
        "warnings": list(what_if.costs.notes),
        "confidence": CONFIDENCE if what_if.costs.bounds else None,
        "speed": what_if.speed,
        "max_model_len": server.max_model_len,
        "max_num_seqs": server.max_num_seqs,
        "speculate": server.guesses,
        "acceptance": server.odds if server.guesses else None,
        "draft_s": server.draft_s if server.guesses else None,
        "ladders": [
            {
                "name": one.ladder.name,
                "source": one.ladder.source,
                "graphs": len(one.graphs),
                "unused_graphs": one.num_unused,
                "replays": one.replays,
                "replay_s": one.seconds,
                "busy_s": one.busy_s,
                "span_s": one.span_s,
                "padding_s": one.padding_s,
                "phases": {
                    phase: {"padded_tokens": one.padded_tokens(phase), "padding": one.padding(phase)}
                    for phase in one.phases
                },
                "uneven_contexts": one.uneven_contexts,
                "compile_s": one.compile_s,
                "warm_up_s": one.warm_up_s,
                "arena_bytes": one.arena_bytes,
                "kv_bytes": one.kv_bytes,
                "misses": one.num_misses,
                "split_prompts": one.split_prompts,
                "unserved": one.unserved,
                "preemptions": one.preemptions,
                "prefix_hit_rate": one.hit_rate,
                "guessing_steps": one.guessing_steps,
                "drafted_tokens": one.drafted,
                "accepted_tokens": one.accepted,
                **{
                    f"{name}_p{percent}_s": percentile(values, percent)
                    for name, values in (
                        ("ttft", one.ttft_s),
                        ("latency", one.total_s),
                        ("added_ttft", one.added_ttft_s),
                        ("added_latency", one.added_s),
                    )
                    for percent in (50, 99)
                },
                "intervals": _intervals(one),
                "buckets": [
                    {
                        "bucket": str(use.bucket),
                        "replays": use.replays,
                        "seconds": use.seconds,
                        "padding": use.padding,
                        "padding_s": use.padding_s,
                    }
                    for use in one.graphs
                ],
                "missed_shapes": [
                    {"phase": m.phase, "sequences": m.num_seqs, "tokens": m.num_tokens, "blocks": m.num_blocks,
                     "count": m.count}
                    for m in one.misses
                ],
            }
            for one in outcomes
        ],
    }  # fmt: skip


def _intervals(one: Outcome) -> dict[str, tuple[float, float]]:
    """Bounds of figures in seconds, by name of the figure; empty if costs have no intervals."""
    from llmc.runtime.simulation.what_if import percentile

    def at(name: str, percent: int) -> Callable[[Outcome], float]:
        return lambda outcome: percentile(getattr(outcome, name), percent)

    figures: dict[str, Callable[[Outcome], float]] = {
        "replay_s": lambda o: o.seconds,
        "busy_s": lambda o: o.busy_s,
        "span_s": lambda o: o.span_s,
        "padding_s": lambda o: o.padding_s,
        "warm_up_s": lambda o: o.warm_up_s,
    }
    for name, values in (
        ("ttft", "ttft_s"), ("latency", "total_s"), ("added_ttft", "added_ttft_s"), ("added_latency", "added_s")
    ):  # fmt: skip
        figures |= {f"{name}_p{percent}_s": at(values, percent) for percent in (50, 99)}
    ranges = {name: one.range_of(value) for name, value in figures.items()}
    return {name: ends for name, ends in ranges.items() if ends is not None}


def _print(what_if: WhatIf, outcomes: list[Outcome]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from llmc.cli.render.console import Console
    from llmc.cli.render.tables import print_table
    from llmc.runtime.simulation.figures import figures, headline, warnings

    console = Console(file=sys.stdout)
    console.print(headline(what_if), highlight=False)
    for one in outcomes:
        if one.ladder.source not in ("", one.ladder.name):
            console.print(f"{one.ladder.name}: {one.ladder.source}", highlight=False, soft_wrap=True)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("")
    for one in outcomes:
        table.add_column(one.ladder.name, justify="right")
    for row in figures(outcomes):
        cells = [f"[bold green]{text}[/]" if best else text for text, best in zip(row.texts, row.best, strict=True)]
        table.add_row(row.name, *cells, end_section=row.last)
    print_table(table, console)
    for line in warnings(what_if, outcomes):
        console.print(line, highlight=False, soft_wrap=True)
