"""`llmc profile`: time of one bucket, by command."""

# ruff: noqa: B008 (typer declares options as argument defaults)
from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from llmc.cli.options.device import check_overlap_sums
from llmc.cli.options.weight_memory import WEIGHT_HELP, WeightMemory
from llmc.output_path import check_outputs

if TYPE_CHECKING:
    from llmc.graphs_records import Tables

_HELP = """Replay one bucket and show its time by kernel family, kernel and command. GB/s and GFLOP/s are shown beside
the machine's limits, measured in the same run. For each thread, the time at barriers is shown.

Without --bucket, the smallest bucket of the phase is used. A decode step runs at the end of the bucket's context.

\b
Examples:
  llmc profile qwen.llmc
  llmc profile qwen.llmc --bucket decode:1x512 --context 128 --threads 2
  llmc profile qwen.llmc --phase prefill --repeat 5 --trace prefill.json
  llmc profile qwen.llmc --bucket prefill:1x512 --json > profile.json
  llmc profile qwen.llmc --bucket decode:1x512 --html profile.html

--html writes one file for any browser: a zoomable timeline, a roofline, tables by op and by layer. Open the file of
--trace in ui.perfetto.dev or chrome://tracing.
"""


class Phase(enum.StrEnum):
    """Phases of a bucket."""

    prefill = "prefill"
    decode = "decode"
    mixed = "mixed"


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command("profile", help=_HELP)(profile_command)


def profile_command(
    artifact: Path = typer.Argument(..., metavar="ARTIFACT", help="Directory made by llmc compile."),
    bucket: str | None = typer.Option(None, metavar="NAME", help="Bucket to replay, such as decode:1x512."),
    phase: Phase = typer.Option(Phase.decode, help="Without --bucket: the smallest bucket of this phase."),
    context: int | None = typer.Option(
        None, min=1, metavar="N", help="Tokens in the KV cache after a decode step; default: the bucket's length."
    ),
    threads: int = typer.Option(0, min=0, metavar="N", help="Threads; 0: every CPU of this process."),
    weight_memory: WeightMemory = typer.Option(WeightMemory.copied, help=WEIGHT_HELP),
    overlap_sums: str | None = typer.Option(
        None, metavar="auto|off|ROWS", callback=check_overlap_sums, help="Of ranks; as of llmc serve."
    ),
    repeat: int = typer.Option(10, min=1, metavar="N", help="Replays to measure; the median is shown."),
    top: int = typer.Option(12, min=0, metavar="N", help="Commands to list; --json lists all."),
    trace: Path | None = typer.Option(None, metavar="FILE", help="Write a Chrome/Perfetto trace of the replay."),
    html: Path | None = typer.Option(None, metavar="FILE", help="Write a report with a timeline to FILE."),
    as_json: bool = typer.Option(False, "--json", help="Print the profile as JSON on stdout."),
) -> None:
    from llmc.cli.render.profile import print_profile
    from llmc.manifest import read_manifest
    from llmc.runtime.binding import Artifact
    from llmc.runtime.graphs_file import read_graphs
    from llmc.runtime.profile.profiler import profile_bucket
    from llmc.runtime.profile.report import profile_data, write_trace
    from llmc.runtime.profile.steps import full_step, longest_context
    from llmc.runtime.report.page import write_page

    check_outputs({"--trace": trace, "--html": html})
    tables = read_graphs(artifact)
    index = choose_graph(tables, bucket, phase.value)
    graph = tables.graphs[index]
    longest = min(graph.seq, longest_context(tables, graph)) if graph.phase == 1 else longest_context(tables, graph)
    if context is not None and context > longest:
        raise typer.BadParameter(f"--context {context} is more than the {longest} tokens that {graph.name} sees")
    if context is not None and graph.phase == 0:
        raise typer.BadParameter(f"--context is for decode steps, {graph.name} starts with an empty cache")
    manifest = read_manifest(artifact)
    with Artifact(artifact) as opened:
        step = full_step(tables, graph, context)
        profile = profile_bucket(
            opened,
            tables,
            manifest,
            index,
            step,
            num_threads=threads,
            repeat=repeat,
            weight_memory=weight_memory.value,
            overlap_sums=overlap_sums,
        )
    if trace is not None:
        write_trace(profile, trace)
    data = profile_data(profile)
    if html is not None:
        from llmc.runtime.profile.html import profile_html

        write_page(profile_html(data, artifact.resolve().name), html)
    if as_json:
        print(json.dumps(data, indent=2))
        return
    print_profile(data, top)
    if html is not None:
        print(f"\nwrote {html}")


def choose_graph(tables: Tables, bucket: str | None, phase: str) -> int:
    """Index of the graph named `bucket`, or else of the smallest one of `phase`. Raises BadParameter that lists the
    graphs."""
    from llmc.graphs_format import PHASES

    names = [graph.name for graph in tables.graphs]
    known = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
    if bucket is not None:
        if bucket.strip().lower() not in names:
            raise typer.BadParameter(f"--bucket: the artifact has no bucket {bucket!r}; it has {known}")
        return names.index(bucket.strip().lower())
    fitting = [(graph.batch, graph.seq, i) for i, graph in enumerate(tables.graphs) if PHASES[graph.phase] == phase]
    if not fitting:
        raise typer.BadParameter(f"--phase: the artifact has no {phase} bucket; it has {known}")
    return min(fitting)[2]
