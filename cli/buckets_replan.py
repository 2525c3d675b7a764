"""`llmc buckets replan`: buckets to add and to retire, for the steps of a server or of a trace."""

# ruff: noqa: B008 (typer declares options as argument defaults)
from __future__ import annotations

import enum
import json
from pathlib import Path

import typer

from llmc.cli.options.numbers import finite
from llmc.units import parse_size

REPLAN_HELP = """Show which buckets to add to a ladder and which to retire, for a server's steps or a trace.

Each change has a predicted saving and cost. Steps are those of about the last hour of a server with --replan suggest or
auto, or of a simulated trace. The command changes nothing; add buckets with llmc compile --add.

\b
Examples:
  llmc buckets replan --url http://127.0.0.1:8000
  llmc buckets replan --url http://127.0.0.1:8000 --cost tokens --json
  llmc buckets replan qwen.llmc --trace trace.jsonl --max-added 2
"""


class ReplanCost(enum.StrEnum):
    """Quantity to reduce."""

    time = "time"
    tokens = "tokens"


def replan_command(
    artifact: Path | None = typer.Argument(None, metavar="ARTIFACT", help="Artifact to plan for, with --trace."),
    trace: Path | None = typer.Option(None, metavar="FILE", help="Trace of requests, plain or .gz, or - for stdin."),
    url: str | None = typer.Option(None, metavar="URL", help="Server that runs with --replan suggest or auto."),
    api_key: str | None = typer.Option(None, envvar="LLMC_API_KEY", metavar="KEY", help="API key of the server."),
    cost: ReplanCost = typer.Option(ReplanCost.time, help="Cost to reduce: time of steps, or tokens of padding."),
    max_graphs: int = typer.Option(
        4096, min=1, metavar="N", help="Graphs in use after the change; further ones are retired."
    ),
    max_added: int = typer.Option(4, min=1, max=64, metavar="N", help="New buckets to propose."),
    max_compile_time: float = typer.Option(
        600.0, min=0, metavar="S", callback=finite, help="Seconds of compilation for the new buckets."
    ),
    max_memory: str = typer.Option("1GiB", metavar="SIZE", help="Memory for the new graphs."),
    least_saving: float = typer.Option(
        1.0,
        min=0,
        max=100,
        metavar="PCT",
        callback=finite,
        help="Percent of the total cost that each new bucket must save.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON on stdout."),
) -> None:
    if (url is None) == (trace is None) or (trace is None) != (artifact is None):
        raise typer.BadParameter("give --url URL, or ARTIFACT and --trace FILE")
    from llmc.buckets.planner import Resources
    from llmc.buckets.replanning.proposal import Policy, propose
    from llmc.cli.render.replan import replan_text
    from llmc.compiler.compile_times import learned
    from llmc.runtime.replan.traffic import of_server, of_trace

    if url is not None:
        traffic = of_server(url, api_key)
    else:
        assert artifact is not None
        assert trace is not None
        traffic = of_trace(artifact, trace)
    if cost is ReplanCost.time and traffic.times is None:
        raise typer.BadParameter(
            "no step was measured, so --cost time cannot be: run llmc warmup, or use --cost tokens"
        )
    resources = learned(Resources())
    policy = Policy(
        unit=cost.value, max_graphs=max_graphs, max_added=max_added, max_compile_s=max_compile_time,
        max_bytes=parse_size(max_memory), least_share=least_saving / 100, once_s=resources.compile_once_s,
        graph_s=resources.compile_graph_s,
    )  # fmt: skip
    found = propose(traffic.uses, traffic.ladder, policy, times=traffic.times, observed_s=traffic.observed_s)
    if as_json:
        server = {} if traffic.state is None else {"server": {k: v for k, v in traffic.state.items() if k != "steps"}}
        print(json.dumps(found.as_dict() | server, indent=2))
    else:
        print(replan_text(found, traffic.state), end="")
