"""`llmc inspect`: contents of an artifact."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from llmc.cli.options.artifact_checks import check_bytes
from llmc.cli.render.artifact_data import artifact_data
from llmc.cli.render.artifact_text import artifact_text
from llmc.cli.render.graph_formats import InspectError, graph_data, graph_dot, graph_onnx
from llmc.cli.render.graph_text import graph_text
from llmc.graphs_records import Graph, Tables
from llmc.manifest import read_manifest
from llmc.output_path import check_outputs
from llmc.replaced_file import write_replaced
from llmc.runtime.graphs_file import read_graphs


class Format(enum.StrEnum):
    """Output formats; dot and onnx show one bucket."""

    text = "text"
    json = "json"
    dot = "dot"
    onnx = "onnx"

    @property
    def is_of_a_bucket(self) -> bool:
        return self in (Format.dot, Format.onnx)


def find_graph(tables: Tables, bucket: str | None, output: Format) -> Graph | None:
    """The graph named `bucket`, as in decode:4x512. Raises typer.BadParameter naming the ones there are."""
    names = ", ".join(g.name for g in tables.graphs[:8]) + (", …" if len(tables.graphs) > 8 else "")
    if bucket is not None:
        for graph in tables.graphs:
            if graph.name == bucket.strip().lower():
                return graph
        raise typer.BadParameter(f"the artifact has no bucket {bucket!r}; it has {names}", param_hint="--bucket")
    if output in (Format.text, Format.json):
        return None
    if len(tables.graphs) == 1:
        return tables.graphs[0]
    raise typer.BadParameter(f"--format {output.value} shows one bucket; name one of {names}", param_hint="--bucket")


def _render(folder: Path, tables: Tables, manifest: dict[str, Any], graph: Graph | None, output: Format) -> bytes:
    if graph is not None and output is Format.onnx:
        return graph_onnx(tables, graph)
    if graph is not None and output is Format.dot:
        return graph_dot(tables, graph).encode()
    if output is Format.json:
        data = artifact_data(tables, manifest) if graph is None else graph_data(tables, graph, manifest)
        return (json.dumps(data, indent=2) + "\n").encode()
    return (artifact_text(tables, manifest, folder) if graph is None else graph_text(tables, graph)).encode()


def inspect(
    artifact: Annotated[
        Path, typer.Argument(help="Directory made by llmc compile; with --dry-run a config.json or a model.")
    ],
    bucket: Annotated[str | None, typer.Option(help="Bucket to show, such as decode:4x512.")] = None,
    output_format: Annotated[
        Format, typer.Option("--format", help="Format of the output; dot and onnx need --bucket.")
    ] = Format.text,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File to write instead of stdout.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="First compare every file with its checksum.")] = False,
    waste: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Show the cost of padding per bucket, from a saved /metrics or a trace."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what llmc compile would make of a model; config.json is enough.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the bucket's graph as a page for a browser.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --html: add measured times, from llmc profile --json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As --format json.")] = False,
    allow_unknown_config: Annotated[
        bool, typer.Option("--allow-unknown-config", help="With --dry-run: as in llmc compile.")
    ] = False,
    tensor_parallel: Annotated[
        int, typer.Option(min=1, max=256, metavar="N", help="With --dry-run: number of ranks, as in llmc compile.")
    ] = 1,
    pipeline_parallel: Annotated[
        int, typer.Option(min=1, max=256, metavar="N", help="With --dry-run: number of stages, as in llmc compile.")
    ] = 1,
    expert_parallel: Annotated[
        bool, typer.Option("--expert-parallel", help="With --dry-run: ranks hold whole experts, as of llmc compile.")
    ] = False,
) -> None:
    """Show buckets, commands, kernels, the memory plan and weights of an artifact.

    With --dry-run, show what llmc compile would make of a model with the default buckets: parameters, FLOPs, bytes of
    weights and of the KV cache, buckets and time. Weights are not read. An unsupported model is refused by name.

    \b
    Examples:
      llmc inspect qwen.llmc
      llmc inspect qwen.llmc --format json
      llmc inspect qwen.llmc --bucket decode:1x512
      llmc inspect qwen.llmc --bucket decode:1x512 --format dot | dot -Tsvg > decode.svg
      llmc inspect qwen.llmc --bucket decode:1x512 --format onnx -o decode.onnx
      llmc inspect qwen.llmc --bucket decode:1x512 --html decode.html
      llmc inspect qwen.llmc --bucket decode:1x512 --html decode.html --profile profile.json
      llmc inspect qwen.llmc --waste metrics.txt
      llmc inspect --dry-run config.json
      llmc inspect --dry-run config.json --tensor-parallel 2
      llmc inspect --dry-run config.json --pipeline-parallel 2
    """
    if as_json:
        if output_format not in (Format.text, Format.json):
            raise typer.BadParameter(f"--json is --format json, not {output_format.value}; leave out one of them")
        output_format = Format.json
    if dry_run:
        given = (bucket, output, waste, html, profile)
        if verify or output_format.is_of_a_bucket or any(option is not None for option in given):
            raise typer.BadParameter("--dry-run looks at a model, not at an artifact: --json is all it takes beside")
        from llmc.cli.inspect_dry_run import dry_run_command

        return dry_run_command(
            artifact,
            as_json=output_format is Format.json,
            allow_unknown_config=allow_unknown_config,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
            expert_parallel=expert_parallel,
        )
    if tensor_parallel * pipeline_parallel != 1 or expert_parallel:
        asked = {"--tensor-parallel": tensor_parallel != 1, "--pipeline-parallel": pipeline_parallel != 1}
        flag = next((flag for flag, there in asked.items() if there), "--expert-parallel")
        raise typer.BadParameter(f"{flag} goes with --dry-run: an artifact has the ranks that it has")
    check_outputs({"--output": output, "--html": html})
    tables = read_graphs(artifact)
    if verify:
        typer.echo(check_bytes(artifact, tables), err=True)
    manifest = read_manifest(artifact)
    if profile is not None and html is None:
        raise typer.BadParameter("--profile goes with --html: name a file for the page", param_hint="--profile")
    if html is not None:
        if waste is not None or output is not None or output_format.is_of_a_bucket:
            raise typer.BadParameter("--html takes --bucket, --profile and --json beside; leave the others out")
        from llmc.cli.inspect_html import graph_page

        chosen = find_graph(tables, bucket, Format.text)
        return graph_page(tables, manifest, artifact, chosen, html, profile, as_json=output_format is Format.json)
    if output_format is Format.onnx and output is None:
        raise typer.BadParameter("--format onnx is binary; name a file", param_hint="-o")
    if waste is not None:
        from llmc.cli.render.waste import waste_text
        from llmc.runtime.simulation.waste import waste_data

        if bucket is not None or output_format not in (Format.text, Format.json):
            raise typer.BadParameter("--waste shows all buckets as text or json; leave --bucket out")
        wasted = waste_data(artifact, waste)
        as_json = output_format is Format.json
        data = (json.dumps(wasted, indent=2) + "\n" if as_json else waste_text(wasted)).encode()
    else:
        data = _render(artifact, tables, manifest, find_graph(tables, bucket, output_format), output_format)
    if output is None:
        typer.echo(data.decode(), nl=False)
        return
    try:
        write_replaced(output, data)
    except OSError as error:
        raise InspectError(f"cannot write {output}: {error.strerror}") from None


def register(app: typer.Typer) -> None:
    """Add `inspect` to the command line."""
    app.command("inspect")(inspect)
