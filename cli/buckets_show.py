"""`llmc buckets show`: a ladder as a grid in the terminal."""

# ruff: noqa: B008 (typer declares options as argument defaults)
from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from llmc.buckets import BucketError, Limits, parse_spec
from llmc.buckets.bucket import TOTAL, Bucket

if TYPE_CHECKING:
    from llmc.buckets.usage import Usage

SHOW_HELP = """Show a ladder as a grid: a spec, a bucket file or the buckets of an artifact.

With a trace, or with a saved /metrics of a server, each bucket shows its share of the steps.

\b
Examples:
  llmc buckets show "prefill=1x128:128:1024,decode=1:8:32x512:512:4096"
  llmc buckets show buckets.toml --trace trace.jsonl
  llmc buckets show qwen.llmc --use metrics.txt
  llmc buckets show qwen.llmc --json
"""
_HEAT = ("grey50", "blue", "cyan", "green", "yellow", "red")
_SHARES = (0.0, 0.005, 0.02, 0.05, 0.15)

_Size = int | tuple[bool, int]
"""A batch size, or (whether the length is a total, the length)."""


def show_command(
    ladder: str = typer.Argument(..., metavar="SPEC|FILE|ARTIFACT", help="Spec, bucket file or artifact directory."),
    trace: Path | None = typer.Option(
        None, metavar="FILE", help="Trace of requests, plain or .gz; -: stdin. Shows how it uses buckets."
    ),
    use: Path | None = typer.Option(None, metavar="FILE", help="Saved /metrics of a server; shows the recorded use."),
    max_num_seqs: int | None = typer.Option(None, metavar="N", help="Value of max for batches."),
    max_model_len: int | None = typer.Option(None, metavar="N", help="Value of max for lengths."),
    block_size: int | None = typer.Option(None, metavar="N", help="Tokens per KV block, for sizes in blocks."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON on stdout."),
) -> None:
    phases = _read_ladder(ladder, Limits(max_num_seqs, max_model_len, block_size))
    if trace is not None and use is not None:
        raise typer.BadParameter("--trace and --use both tell how buckets are used: give one of them")
    used = _usage(phases, trace) if trace is not None else _recorded(phases, use) if use is not None else {}
    if as_json:
        print(json.dumps(_show_data(phases, used), indent=2))
    else:
        _print_grids(phases, used)


def _read_ladder(text: str, limits: Limits) -> dict[str, list[Bucket]]:
    path = Path(text)
    if path.is_dir():
        from llmc.manifest import read_manifest

        names = read_manifest(path).get("buckets")
        if not names:
            raise BucketError(f"the manifest of {path} lists no buckets; compile the model again")
        buckets = [Bucket.parse(name) for name in names]
    else:
        buckets = list(parse_spec(text, limits))
    phases: dict[str, list[Bucket]] = {}
    for bucket in sorted(buckets):
        phases.setdefault(bucket.phase, []).append(bucket)
    return {phase: phases[phase] for phase in ("prefill", "mixed", "decode") if phase in phases}


def _usage(phases: dict[str, list[Bucket]], path: Path) -> dict[str, Usage]:
    from llmc.buckets.trace import read_trace
    from llmc.buckets.warm_order import ladder_usage

    return ladder_usage(read_trace(path), (bucket for buckets in phases.values() for bucket in buckets))


def _recorded(phases: dict[str, list[Bucket]], path: Path) -> dict[str, Usage]:
    from llmc.buckets.recorded_use import read_bucket_use, read_missed
    from llmc.buckets.usage import BucketUse, Usage

    found = {one.bucket: one for one in read_bucket_use(path)}
    missed = read_missed(path, 1)
    result = {}
    for phase, buckets in phases.items():
        unknown = [str(bucket) for bucket in found if bucket.phase == phase and bucket not in buckets]
        if unknown:
            raise BucketError(f"{path} tells of {unknown[0]}, which the ladder does not have: it is of another ladder")
        mine = [found.get(bucket) for bucket in buckets]
        uses = [
            BucketUse(bucket, one.replays if one else 0.0, one.padding if one else 0.0)
            for bucket, one in zip(buckets, mine, strict=True)
        ]
        misses = float(sum(miss.count for miss in missed if miss.phase == phase))
        result[phase] = Usage(tuple(uses), sum(one.steps for one in uses), misses)
    return result


def _show_data(phases: dict[str, list[Bucket]], used: dict[str, Usage]) -> dict[str, Any]:
    data: dict[str, Any] = {"graphs": sum(map(len, phases.values()))}
    for phase, buckets in phases.items():
        rows: list[dict[str, Any]] = [
            {"batch": b.batch, "seq": b.seq, **({TOTAL: True} if b.total else {})} for b in buckets
        ]
        if phase in used:
            for row, use in zip(rows, used[phase].uses, strict=True):
                row |= {"steps": use.steps, "share": use.steps / (used[phase].steps or 1), "padding": use.padding}
        data[phase] = rows
    if used:
        data["missed"] = {phase: use.missed for phase, use in used.items()}
    return data


def _print_grids(phases: dict[str, list[Bucket]], used: dict[str, Usage]) -> None:
    from rich.table import Table

    from llmc.cli.render.console import Console
    from llmc.cli.render.tables import print_table

    console = Console()
    for phase, buckets in phases.items():
        shares = {use.bucket: use.steps / (used[phase].steps or 1) for use in used[phase].uses} if phase in used else {}
        batches, seqs = sorted({b.batch for b in buckets}), sorted({(b.total, b.seq) for b in buckets})
        by_size: dict[tuple[_Size, _Size], Bucket] = {(b.batch, (b.total, b.seq)): b for b in buckets}
        table = Table(title=f"{phase}: {len(buckets)} buckets", title_justify="left", padding=(0, 1))
        # The axis with more sizes runs vertically.
        down = len(seqs) >= len(batches)
        table.add_column("seq ╲ batch" if down else "batch ╲ seq", justify="right")
        for size in batches if down else seqs:
            table.add_column(_size(size), justify="right")
        for row in seqs if down else batches:
            cells = []
            for column in batches if down else seqs:
                bucket = by_size.get((column, row) if down else (row, column))
                cells.append("[dim]·[/]" if bucket is None else _cell(shares.get(bucket)))
            table.add_row(_size(row), *cells)
        print_table(table, console)
        if phase in used:
            steps, missed = used[phase].steps, used[phase].missed
            note = f"; {missed / (steps or 1):.2%} of them fit no bucket" if missed else ""
            unused = sum(1 for use in used[phase].uses if use.steps == 0)
            console.print(f"{steps:,.0f} steps{note}; {unused} buckets unused", highlight=False)


def _size(size: _Size) -> str:
    return str(size) if isinstance(size, int) else f"{size[1]}{TOTAL if size[0] else ''}"


def _cell(share: float | None) -> str:
    if share is None:
        return "■"
    heat = _HEAT[sum(share > bound for bound in _SHARES)]
    text = "0" if share == 0 else "<0.1%" if share < 0.0005 else f"{share:.1%}"
    return f"[{heat}]{text}[/]"
