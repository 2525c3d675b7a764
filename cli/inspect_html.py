"""`llmc inspect --html`: the graph of a bucket as a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from llmc.cli.render.graph_formats import graph_data
from llmc.cli.render.graph_html import graph_html, with_times
from llmc.graphs_format import PHASES
from llmc.graphs_records import Graph, Tables
from llmc.runtime.report.page import write_page


def graph_page(
    tables: Tables,
    manifest: dict[str, Any],
    artifact: Path,
    graph: Graph | None,
    html: Path,
    profile: Path | None,
    *,
    as_json: bool,
) -> None:
    """Writes the page of `graph`; None: the first decode bucket, or the first of all. profile: file with times.

    Raises InspectError and ReportError.
    """
    decode = [one for one in tables.graphs if PHASES[one.phase] == "decode"]
    graph = graph or (decode or tables.graphs)[0]
    data = graph_data(tables, graph, manifest)
    if profile is not None:
        data = with_times(data, profile)
    write_page(graph_html(data, artifact.resolve().name, [one.name for one in tables.graphs]), html)
    typer.echo(json.dumps(data, indent=2) if as_json else f"wrote {html}, the graph of {graph.name}")
