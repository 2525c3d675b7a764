"""`llmc buckets import`: the ladder of a server on Intel Gaudi, from its environment variables."""

# ruff: noqa: B008 (typer declares options as argument defaults)
from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from llmc.buckets import BucketError, format_spec
from llmc.buckets.bucket import MAX_DIM
from llmc.regular_file import read_text

if TYPE_CHECKING:
    from llmc.buckets.vllm import Imported, VllmLimits

IMPORT_HELP = """Import the buckets of a vLLM server on Intel Gaudi. The ladder has the shapes that the server warms up,
by its VLLM_*_BUCKET_* variables, its strategy or bucket file, and its flags.

Without -o, the last line of the output is the ladder as a SPEC for --buckets. An unknown variable is an error.

\b
Examples:
  llmc buckets import --from-vllm-env --max-num-seqs 64 --max-model-len 4096 --max-num-batched-tokens 2048
  llmc buckets import --from-vllm-env --env-file gaudi.env --max-num-seqs 64 --max-model-len 4096
    --max-num-batched-tokens 2048 --explain -o buckets.toml
"""
_SHOWN = 24


def import_command(
    from_vllm_env: bool = typer.Option(False, "--from-vllm-env", help="Read the variables of vLLM's plugin for Gaudi."),
    env_file: Path | None = typer.Option(
        None, metavar="FILE", help="File of NAME=value lines to read instead of the environment."
    ),
    max_num_seqs: int = typer.Option(..., min=1, max=MAX_DIM, metavar="N", help="As the server's flag of this name."),
    max_model_len: int = typer.Option(..., min=1, max=MAX_DIM, metavar="N", help="As the server's flag of this name."),
    max_num_batched_tokens: int = typer.Option(
        ..., min=1, max=MAX_DIM, metavar="N", help="As the server's flag of this name."
    ),
    block_size: int = typer.Option(128, min=1, max=MAX_DIM, metavar="N", help="As the server's flag of this name."),
    num_blocks: int | None = typer.Option(
        None, min=1, max=MAX_DIM, metavar="N", help="KV blocks in the server's log; default: enough for all sequences."
    ),
    output: Path | None = typer.Option(
        None, "-o", "--output", metavar="FILE", help="Bucket file to write, .toml or .json."
    ),
    totals: bool = typer.Option(
        False, "--totals", help="Decode buckets for the total of contexts, as the plugin's, instead of the longest."
    ),
    explain: bool = typer.Option(False, "--explain", help="Explain each variable, and what was dropped and why."),
    as_json: bool = typer.Option(False, "--json", help="Print the ladder and the explanation as JSON on stdout."),
) -> None:
    from llmc.buckets.files import write_file
    from llmc.buckets.vllm import VllmLimits, import_vllm, parse_env_file

    if not from_vllm_env:
        raise typer.BadParameter("say what to import: --from-vllm-env reads the variables of vLLM's plugin for Gaudi")
    limits = VllmLimits(max_num_seqs, max_model_len, max_num_batched_tokens, block_size, num_blocks, totals)
    environ = dict(os.environ)
    if env_file is not None:
        environ = parse_env_file(_read(env_file), str(env_file), environ)
    folder = env_file.parent if env_file is not None else Path()
    found = import_vllm(environ, limits, lambda name: _read(_beside(folder, name)))
    if output is not None:
        write_file(output, found.ladder, _comment(found, limits))
    if as_json:
        print(json.dumps(import_data(found, limits), indent=2))
        return
    if explain:
        _print(found)
    if output is not None:
        print(f"wrote {output}: {len(found.ladder.prefill)} prefill and {len(found.ladder.decode)} decode buckets")
    else:
        print(format_spec(found.ladder))


def import_data(found: Imported, limits: VllmLimits) -> dict[str, Any]:
    """All findings, for people and tools. The plugin's shapes are (batch, query, context blocks)."""
    from llmc.buckets.files import entry

    return {
        "max_num_seqs": limits.max_num_seqs,
        "max_model_len": limits.max_model_len,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "block_size": limits.block_size,
        "num_blocks": limits.device_blocks,
        "strategy": "file" if found.server.shapes is not None else found.server.strategy,
        "contiguous": found.server.contiguous,
        "variables": [
            {"name": one.variable, "value": one.value, "meaning": one.meaning, "effect": one.effect}
            for one in found.effects
        ],
        "axes": {name: {**dict(axis.numbers), "sizes": axis.sizes} for name, axis in found.shapes.axes.items()},
        "plugin": {"prompt": found.shapes.prompt, "decode": found.shapes.decode},
        "changes": found.changes,
        "prefill": [entry(bucket) for bucket in found.ladder.prefill],
        "decode": [entry(bucket) for bucket in found.ladder.decode],
        "spec": format_spec(found.ladder),
    }


def _beside(folder: Path, name: str) -> Path:
    """Finds a bucket file as the server does: from the current directory, or beside the file that names it."""
    path = Path(name)
    return path if path.exists() or not (folder / path).exists() else folder / path


_MAX_FILE_BYTES = 1 << 24


def _read(path: Path) -> str:
    try:
        return read_text(path, _MAX_FILE_BYTES)
    except OSError as error:
        raise BucketError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise BucketError(f"{path} is not UTF-8 text: {error}; write lines of NAME=value") from error


def _comment(found: Imported, limits: VllmLimits) -> str:
    set_here = [f"{one.variable}={one.value}" for one in found.effects]
    return "\n".join(
        [
            "Taken over from vLLM on Intel Gaudi by llmc buckets import.",
            f"Compile with --max-num-seqs {limits.max_num_seqs} --max-model-len {limits.max_model_len} "
            f"--max-num-batched-tokens {limits.max_num_batched_tokens}.",
            *set_here,
        ]
    )


def _print(found: Imported) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from llmc.buckets.vllm_shapes import STRATEGIES
    from llmc.cli.render.console import Console
    from llmc.cli.render.tables import print_table

    console = Console(highlight=False, markup=False)
    if found.effects:
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
        table.add_column("variable", no_wrap=True)
        for name in ("value", "what it is", "what it does: + with it, − without"):
            table.add_column(name, overflow="fold")
        for one in found.effects:
            table.add_row(one.variable, one.value, one.meaning, one.effect)
        print_table(table, console)
    else:
        console.print("no variable of the plugin is set: these are its defaults")
    server = found.server
    rule = "bucket file" if server.shapes is not None else f"{STRATEGIES[server.strategy]} strategy"
    console.print(f"\n{rule}, {'contiguous' if server.contiguous else 'paged'} attention, {server.num_blocks} blocks")
    if found.shapes.axes:
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for name in ("axis", "numbers", "sizes"):
            table.add_column(name, overflow="fold")
        for name, axis in found.shapes.axes.items():
            numbers = " ".join(f"{number.lower()} {value}" for number, value in axis.numbers)
            shown = " ".join(map(str, axis.sizes[:_SHOWN]))
            rest = f" … {axis.sizes[-1]} ({len(axis.sizes)} sizes)" if len(axis.sizes) > _SHOWN else ""
            table.add_row(name, numbers, shown + rest)
        print_table(table, console)
    console.print(
        f"\nthe plugin's shapes: {len(found.shapes.prompt)} of prompts, {len(found.shapes.decode)} of decode; "
        f"here {len(found.ladder.prefill)} prefill and {len(found.ladder.decode)} decode buckets"
    )
    for change in found.changes:
        console.print(f"  {change}")
