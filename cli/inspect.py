"""`llmc inspect`: what is in an artifact."""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from llmc.cli.options.verify import check_bytes
from llmc.cli.render.graph_formats import InspectError, graph_data, graph_dot, graph_onnx
from llmc.cli.render.ranks import ranks_data, ranks_text
from llmc.cli.render.stored_weights import (
    bits_per_weight,
    error_column,
    stored_weights,
    weights_by_class,
    weights_by_scheme,
)
from llmc.cli.render.text_columns import table
from llmc.graphs_format import DTYPES, FAMILIES
from llmc.graphs_records import Graph, ModelRecord, Tables
from llmc.manifest import read_manifest
from llmc.runtime.context_limit import DEFAULT_KV_BYTES
from llmc.runtime.graph_view import commands_of, memory_plan, op_of
from llmc.runtime.graphs_file import read_graphs
from llmc.units import format_bytes


class Format(enum.StrEnum):
    """Output formats; dot and onnx show one bucket."""

    text = "text"
    json = "json"
    dot = "dot"
    onnx = "onnx"

    @property
    def is_of_a_bucket(self) -> bool:
        return self in (Format.dot, Format.onnx)


def _kernels(tables: Tables) -> list[dict[str, Any]]:
    calls: Counter[int] = Counter()
    for graph in tables.graphs:
        calls.update(c.kernel for c in tables.commands_of(graph))
    return [
        {
            "symbol": k.symbol,
            "op": op_of(k.symbol),
            "family": FAMILIES[k.family],
            "num_buffers": k.num_buffers,
            "calls": calls[i],
        }
        for i, k in enumerate(tables.kernels)
    ]


def _kv_pool(model: ModelRecord) -> dict[str, int]:
    """Bytes of a KV block, and of the pool that holds one sequence of the longest length; the longest that the engine's
    default pool holds."""
    block_bytes = model.kv_block_bytes
    blocks = -(-model.max_model_len // model.block_size)
    default_blocks = max(1, min(model.max_num_seqs * blocks, DEFAULT_KV_BYTES // block_bytes))
    return {
        "block_bytes": block_bytes,
        # One block more: the dummy block of padding.
        "full_context_bytes": (blocks + 1) * block_bytes,
        "default_max_request_tokens": min(model.max_model_len, default_blocks * model.block_size),
    }


def _adapters(tables: Tables) -> dict[str, int] | None:
    """What LoRA adapters have room for, and how many commands of a graph are theirs; None where none can be loaded."""
    model = tables.model
    if not model.adapter_slots:
        return None
    mine = {i for i, kernel in enumerate(tables.kernels) if op_of(kernel.symbol).startswith("adapter_")}
    return {
        "slots": model.adapter_slots,
        "rank": model.adapter_rank,
        "layers": len(tables.adapters),
        "slot_bytes": sum(adapter.slot.bytes for adapter in tables.adapters),
        "commands": sum(command.kernel in mine for command in tables.commands_of(tables.graphs[0])),
    }


def _adapter_text(adapters: dict[str, int] | None) -> Iterator[str]:
    if adapters is not None:
        yield (
            f"LoRA adapters: {adapters['slots']} at once of rank {adapters['rank']} or less, "
            f"{format_bytes(adapters['slot_bytes'])} each, of {adapters['layers']} layers; {adapters['commands']} "
            "commands of a graph are theirs"
        )


def _kv_text(model: ModelRecord, pool: dict[str, int]) -> str:
    text = f"KV pool: {format_bytes(pool['full_context_bytes'])} hold one sequence of {model.max_model_len} tokens"
    least = pool["default_max_request_tokens"]
    return text if least == model.max_model_len else f"{text}; the default pool holds {least}: see --kv-bytes"


def artifact_data(tables: Tables, manifest: dict[str, Any]) -> dict[str, Any]:
    """Plain data of the artifact: model, kernels, buckets, weights by scheme and one by one."""
    weights = stored_weights(tables, manifest)
    return {
        "format_version": tables.header.version,
        "target": asdict(tables.target),
        "fingerprint": manifest.get("fingerprint"),
        "source": manifest.get("source"),
        "merged_lora": manifest.get("merged_lora") or [],
        "adapters": _adapters(tables),
        "ranks": ranks_data(tables),
        "model": {
            **asdict(tables.model),
            "kv_dtype": tables.model.kv.name,
            "act_dtype": DTYPES[tables.model.act_dtype],
        },
        "context": manifest.get("context"),
        "kv_pool": _kv_pool(tables.model),
        "buckets": [
            {
                "bucket": g.name,
                "max_tokens": g.max_tokens,
                "max_seqs": g.max_seqs,
                "row_unit": g.row_unit,
                "commands": g.num_commands,
                "arena_bytes": g.arena_bytes,
            }
            for g in tables.graphs
        ],
        "kernels": _kernels(tables),
        "weights_by_scheme": weights_by_scheme(weights),
        "weights_by_class": weights_by_class(weights, manifest),
        "bits_per_weight": bits_per_weight(weights, manifest),
        "weights": weights,
    }


_MOST_SOURCES = 4
_CUT_BY = {
    "default": "the default; --max-model-len of llmc compile raises it",
    "option": "by --max-model-len",
    "buckets": "by the largest decode bucket",
}


def _context(max_model_len: int, manifest: dict[str, Any]) -> str:
    """How the longest request compares with what the model was made for; nothing where they are the same."""
    context = manifest.get("context")
    if context is None or max_model_len == context["model_len"]:
        return ""
    model_len = context["model_len"]
    if max_model_len > model_len:
        return f" (the model was trained for {model_len})"
    why = _CUT_BY.get(str(context["cut_by"]))
    return f" of the model's {model_len}" + (f" ({why})" if why else "")


def _origin(data: dict[str, Any]) -> Iterator[str]:
    """Lines that say where the weights come from, as far as anything is known."""
    if source := data["source"]:
        yield f"from the hub: {source['repo']} at {source['revision']}"
    if merged := data["merged_lora"]:
        yield f"LoRA adapters merged: {', '.join(adapter['name'] for adapter in merged)}"


def _task(tables: Tables, manifest: dict[str, Any]) -> Iterator[str]:
    """What a model that writes no text gives."""
    width, task = tables.model.vector_width, (manifest.get("model") or {}).get("task")
    if width:
        name = f"task {task['name']}: " if task else ""
        whole = ", all of a prompt in one step" if tables.model.whole_prompts else ""
        yield f"{name}vectors of {width}{whole}"


def _here(kind: str) -> Iterator[str]:
    """Whether this machine has a device for code that is for no CPU."""
    from llmc.runtime.binding.devices import Device
    from llmc.runtime.binding.handle import LlmcError

    if kind == "cpu":
        return
    try:
        with Device(kind) as device:
            facts = device.facts
    except LlmcError as error:
        yield f"this machine: no device of kind {kind}: {error}"
        return
    shown = (f"{name} {facts[name]}" for name in ("device", "target", "memory_bytes") if name in facts)
    yield f"this machine: {', '.join(shown)}"


def artifact_text(tables: Tables, manifest: dict[str, Any]) -> str:
    """The artifact for people."""
    data = artifact_data(tables, manifest)
    model = tables.model
    total = sum(w["bytes"] for w in data["weights"])
    # Those of an encoder take turns with one KV cache, and its tables count that.
    layers = (manifest.get("model") or {}).get("num_layers", model.num_layers)
    parts = [
        f"artifact format {data['format_version']}, fingerprint {data['fingerprint'] or 'unknown'}",
        f"target: {tables.target.name}, for devices of kind {tables.target.kind} with level {tables.target.level} or "
        f"more; activations and KV cache lie in {tables.target.layout}",
        *_here(tables.target.kind),
        f"model: {layers} layers, {model.num_kv_heads} KV heads of {model.head_dim}, vocabulary "
        f"{model.vocab_size}, up to {model.max_model_len} tokens{_context(model.max_model_len, manifest)} and "
        f"{model.max_num_seqs} sequences",
        f"dtypes: activations {DTYPES[model.act_dtype]}, KV cache {model.kv.name}, blocks of {model.block_size} tokens",
        _kv_text(tables.model, data["kv_pool"]),
        *_task(tables, manifest),
        *_origin(data),
        *_adapter_text(data["adapters"]),
        *ranks_text(data["ranks"]),
        f"\nbuckets ({len(tables.graphs)}); largest arena {format_bytes(max(g.arena_bytes for g in tables.graphs))}",
        table(
            ("bucket", "tokens", "sequences", "row unit", "commands", "arena bytes"),
            [(g.name, g.max_tokens, g.max_seqs, g.row_unit, g.num_commands, g.arena_bytes) for g in tables.graphs],
        ),
        f"\nkernels ({len(tables.kernels)})",
        table(
            ("kernel", "family", "buffers", "calls"),
            [(k["symbol"], k["family"], k["num_buffers"], k["calls"]) for k in data["kernels"]],
        ),
        f"\nweights ({len(tables.weights)}), {format_bytes(total)}",
        table(
            ("weights of", "scheme", "numbers in", "method", "error", "count", "bits a weight", "bytes"),
            [
                (
                    w["class"],
                    w["scheme"],
                    w["groups"],
                    w["method"],
                    error_column(w),
                    w["count"],
                    f"{w['bits_per_weight']:g}",
                    w["bytes"],
                )
                for w in data["weights_by_class"]
            ],
        ),
        _bits_text(data["bits_per_weight"]),
        "",
        table(
            ("weight", "dtype", "shape", "layout", "bytes", "from"),
            [
                (
                    w["name"],
                    w["dtype"],
                    "x".join(map(str, w["shape"])),
                    w["layout"],
                    w["bytes"],
                    _sources(w["sources"]),
                )
                for w in data["weights"]
            ],
        ),
    ]
    return "\n".join(parts) + "\n"


def _sources(names: list[str]) -> str:
    """Experts come from very many."""
    more = len(names) - _MOST_SOURCES
    shown = names if more <= 0 else [*names[:_MOST_SOURCES], f"{more} more"]
    return ", ".join(shown) or "-"


def _bits_text(bits: dict[str, float]) -> str:
    """As in `  4.7 bits a weight: w4a8 4.2, w8a8 8.04`; nothing is known of an artifact without shapes."""
    parts = ", ".join(f"{scheme} {value:g}" for scheme, value in bits.items() if scheme != "all")
    return f"  {bits['all']:g} bits a weight of a matrix, scales included: {parts}" if bits else ""


def graph_text(tables: Tables, graph: Graph) -> str:
    """One bucket for people: commands with their buffers, then the memory plan."""
    commands = commands_of(tables, graph)
    lines = [
        f"{graph.name}: up to {graph.max_tokens} tokens, {graph.max_seqs} sequences, {graph.max_samples} samples, "
        f"row unit {graph.row_unit}, arena {format_bytes(graph.arena_bytes)}",
        f"\ncommands ({len(commands)}); > marks what is written, | a barrier",
    ]
    for c in commands:
        layer = "" if c.layer < 0 else f"layer {c.layer}"
        lines.append(f"  {c.index:4d}{'|' if c.barrier else ' '} {c.symbol}  {layer}".rstrip())
        for b in c.buffers:
            size = f"{b.bytes} bytes{' a block' if b.kind in ('k_pool', 'v_pool') else ''}"
            where = f" at {b.offset}" if b.kind == "arena" else ""
            lines.append(f"        {'>' if b.written else ' '} {b.kind:7} {b.name}  {b.type}  {size}{where}")
    lines.append(f"\nmemory plan, arena of {graph.arena_bytes} bytes")
    lines.append(
        table(
            ("value", "type", "offset", "bytes", "first", "last"),
            [
                (v.name, f"{v.dtype}[{', '.join(map(str, v.shape))}]", v.offset, v.bytes, v.first, v.last)
                for v in memory_plan(commands)
            ],
        )
    )
    return "\n".join(lines) + "\n"


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


def _render(tables: Tables, manifest: dict[str, Any], graph: Graph | None, output: Format) -> bytes:
    if graph is not None and output is Format.onnx:
        return graph_onnx(tables, graph)
    if graph is not None and output is Format.dot:
        return graph_dot(tables, graph).encode()
    if output is Format.json:
        data = artifact_data(tables, manifest) if graph is None else graph_data(tables, graph, manifest)
        return (json.dumps(data, indent=2) + "\n").encode()
    return (artifact_text(tables, manifest) if graph is None else graph_text(tables, graph)).encode()


def inspect(
    artifact: Annotated[
        Path, typer.Argument(help="Directory made by llmc compile; with --dry-run a config.json or a model.")
    ],
    bucket: Annotated[str | None, typer.Option(help="One bucket, as in decode:4x512.")] = None,
    output_format: Annotated[Format, typer.Option("--format", help="dot and onnx show one bucket.")] = Format.text,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File to write instead of stdout.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="First compare every byte with its checksum.")] = False,
    waste: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What padding costs in each bucket, by a saved /metrics or a trace."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="What llmc compile would make of a model: its config.json is enough.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the graph of a bucket as one page for a browser.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --html: times, from llmc profile --json of the bucket.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As --format json.")] = False,
    allow_unknown_config: Annotated[
        bool, typer.Option("--allow-unknown-config", help="With --dry-run: as of llmc compile.")
    ] = False,
) -> None:
    """Show buckets, commands, kernels, the memory plan and weights of an artifact.

    With --dry-run: show what llmc compile would make of a model, with the default buckets. Figures are parameters,
    FLOPs, bytes of weights and of the KV cache, buckets and time. Weights are not read; a model out of reach is refused
    by name.

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
            artifact, as_json=output_format is Format.json, allow_unknown_config=allow_unknown_config
        )
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
        data = _render(tables, manifest, find_graph(tables, bucket, output_format), output_format)
    if output is None:
        typer.echo(data.decode(), nl=False)
        return
    try:
        output.write_bytes(data)
    except OSError as error:
        raise InspectError(f"cannot write {output}: {error.strerror}") from None


def register(app: typer.Typer) -> None:
    """Add `inspect` to the command line."""
    app.command("inspect")(inspect)
