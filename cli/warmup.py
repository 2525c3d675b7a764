"""`llmc warmup`: warms up the graphs of an artifact and measures their costs on this machine."""

# ruff: noqa: B008 (typer declares options as argument defaults)
from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from llmc.cli.options.warm_flags import ORDER_HELP, ORDER_METAVAR, REPLAY_S, SECONDS_HELP
from llmc.cli.options.weight_memory import WEIGHT_HELP, WeightMemory

# Untrusted costs are measured again at once, at most that often.
_MORE_ROUNDS = 2

if TYPE_CHECKING:
    from llmc.buckets.cost_table import CostTable
    from llmc.runtime.warm_up.warm_up import WarmUp

_HELP = """Warm an artifact up: replay its graphs, and measure those whose cost is unknown.

Some known costs are measured again: those that fall as buckets grow, and those measured on a busy machine.

A model directory is compiled first, in parallel and through the graph cache. Costs are stored by artifact and machine.
llmc buckets plan --cost measured and llmc buckets simulate use them, and llmc serve does not measure them again. An
interrupted command keeps its measurements.

\b
Examples:
  llmc warmup qwen.llmc
  llmc warmup qwen.llmc --trace trace.jsonl --order traffic
  llmc warmup qwen.llmc --again --seconds 1 --json
"""


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command("warmup", help=_HELP)(warmup_command)


def warmup_command(
    model: Path = typer.Argument(
        ..., metavar="ARTIFACT|MODEL", help="Artifact, model directory, .gguf, or ORG/NAME (hub)."
    ),
    trace: Path | None = typer.Option(
        None, metavar="FILE", help="Trace of requests, plain or .gz; -: stdin. Buckets that it uses come first."
    ),
    order: str = typer.Option(
        "auto",
        metavar=ORDER_METAVAR,
        help=f"Order of the graphs; auto: traffic with a trace, else by size.{ORDER_HELP}",
    ),
    again: bool = typer.Option(False, "--again", help="Also measure known costs again."),
    seconds: float = typer.Option(0.3, min=0, metavar="S", help="Seconds, roughly, for each measurement."),
    warmup_seconds: float = typer.Option(REPLAY_S, min=0, metavar="S", help=SECONDS_HELP),
    num_threads: int = typer.Option(
        0, "--num-threads", "--threads", min=0, metavar="N", help="Threads; 0: every CPU of this process."
    ),
    pin: bool = typer.Option(True, "--pin/--no-pin", help="Bind each thread to its own CPU."),
    weight_memory: WeightMemory = typer.Option(WeightMemory.copied, help=WEIGHT_HELP),
    cache_dir: Path | None = typer.Option(None, metavar="DIR", help="Cache in which the costs are stored."),
    as_json: bool = typer.Option(False, "--json", help="Print the costs as JSON on stdout."),
) -> None:
    from llmc.cli.options.warm_up import WarmOptions, WarmUpPlanner, say, warm_up_progress
    from llmc.cli.serve import compile_aside
    from llmc.model_artifact import given_artifact
    from llmc.runtime.binding import Artifact, Engine
    from llmc.runtime.warm_up.cost_tables import table_warnings
    from llmc.runtime.warm_up.overhead import measure_overhead
    from llmc.runtime.warm_up.warm_up import WarmPlan, WarmUp

    folder = None if cache_dir is None else cache_dir / "costs"
    options = WarmOptions(
        trace=trace,
        strategy=order,
        again=again,
        measure_s=seconds,
        cost_folder=folder,
        replay_s=warmup_seconds,
        must_keep=True,
    )
    artifact_path = given_artifact(model) or compile_aside(model)
    planner = WarmUpPlanner(artifact_path, options)
    with (
        Artifact(artifact_path) as artifact,
        Engine(artifact, num_threads=num_threads, pin_threads=pin, weight_memory=weight_memory.value) as engine,
    ):
        info, graphs = artifact.info, artifact.graphs()
        plan = planner.plan(graphs, engine.stats.device.get("threads", 0))
        warming = WarmUp(engine, graphs, plan, block_size=info.block_size, max_model_len=info.max_model_len)
        with warm_up_progress(planner) as on_step:
            warming.run(on_step)
        for _ in range(_MORE_ROUNDS if plan.measure else 0):
            again_by = planner.doubtful()
            if not again_by:
                break
            say(f"{len(again_by)} graphs are measured again: their costs fall as buckets grow, or the machine was busy")
            more = WarmPlan(tuple(sorted(again_by)), len(again_by), again_by, measure_s=seconds)
            WarmUp(engine, graphs, more, block_size=info.block_size, max_model_len=info.max_model_len).run(planner.take)
        # What surrounds a step is measured on decode steps, which a model that gives vectors has not.
        if plan.measure and not info.vector_width:
            planner.take_overhead(*measure_overhead(engine, info.max_num_seqs))
    recorder = planner.flush()
    assert recorder is not None
    for warning in table_warnings(recorder.table):
        say(f"warning: {warning}")
    report(recorder.table, recorder.path, warming, len(plan.measure), as_json=as_json)


def report(table: CostTable, path: Path, warming: WarmUp, num_measured: int, *, as_json: bool) -> None:
    """Prints the costs: a table for people, or JSON."""
    from llmc.runtime.warm_up.cost_tables import table_warnings

    if as_json:
        counts = warming.counts
        summary: dict[str, Any] = {
            "graphs": warming.total,
            "measured": num_measured,
            "seconds": round(warming.seconds, 3),
        }
        summary |= {"replayed": counts.replayed, "walked": counts.walked, "warnings": table_warnings(table)}
        print(json.dumps(summary | {"cost_table": str(path), **json.loads(table.to_json())}, indent=2))
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from llmc.cli.render.console import Console
    from llmc.cli.render.tables import print_table

    console = Console()
    shown = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in ("phase", "graphs", "fastest", "median", "slowest"):
        shown.add_column(column, justify="left" if column == "phase" else "right")
    full = table.full()
    for phase in dict.fromkeys(bucket.phase for bucket in full):
        times = sorted(seconds * 1e3 for bucket, seconds in full.items() if bucket.phase == phase)
        cells = (f"{value:.2f} ms" for value in (times[0], statistics.median(times), times[-1]))
        shown.add_row(phase, str(len(times)), *cells)
    print_table(shown, console)
    counts = warming.counts
    console.print(
        f"{counts.warm} graphs warm in {warming.seconds:.1f} s, {counts.replayed} replayed and {counts.walked} walked; "
        f"{num_measured} of them measured; costs in {path}",
        highlight=False,
        soft_wrap=True,
    )
