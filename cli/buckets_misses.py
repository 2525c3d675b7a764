"""`llmc buckets misses`: shapes without a bucket that occurred while serving."""

# ruff: noqa: B008 (typer declares options as argument defaults)
from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from llmc.buckets.misses import Miss

MISSES_HELP = """Show which steps missed their bucket, how often, and how they ran instead.

The command reads the records of --record-misses. Each row names the bucket to add.

\b
Examples:
  llmc buckets misses misses.jsonl
  llmc buckets misses misses-*.jsonl --top 10
  llmc buckets misses misses.jsonl --json
"""


def misses_command(
    records: list[Path] = typer.Argument(..., metavar="FILE…", help="Records of misses; equal shapes are summed."),
    top: int = typer.Option(0, min=0, metavar="N", help="Show only the N most frequent shapes; 0: all."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON on stdout."),
) -> None:
    from llmc.buckets.misses import merge_misses, read_misses

    found = merge_misses([miss for path in records for miss in read_misses(path)])
    shown = found[:top] if top else found
    if as_json:
        rows = [json.loads(miss.line()) | {"wanted": str(miss.wanted)} for miss in shown]
        print(json.dumps({"count": sum(miss.count for miss in found), "shapes": len(found), "misses": rows}, indent=2))
    else:
        _print(shown, found)


def _print(shown: Sequence[Miss], found: Sequence[Miss]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from llmc.cli.render.console import Console
    from llmc.cli.render.tables import print_table

    console = Console()
    total = sum(miss.count for miss in found)
    if not total:
        console.print("no misses recorded: every step had a bucket", highlight=False)
        return
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    # The row is named after the bucket to add, which is the purpose of the report.
    columns: dict[str, Any] = {"would fit": "left", "missed": "right", "share": "right", "served by": "left",
                               "seqs": "right", "tokens": "right", "context": "right", "last": "left"}  # fmt: skip
    for name, justify in columns.items():
        table.add_column(name, justify=justify)
    for miss in shown:
        last = time.strftime("%Y-%m-%d %H:%M", time.localtime(miss.time))
        served = "[red]nothing, split or failed[/]" if miss.bucket is None else str(miss.bucket)
        table.add_row(str(miss.wanted), f"{miss.count:,}", f"{miss.count / total:.1%}", served, f"{miss.batch}",
                      f"{miss.tokens}", f"{miss.context}", last)  # fmt: skip
    print_table(table, console)
    rest = f", {len(shown)} of them shown" if len(shown) < len(found) else ""
    console.print(f"{total:,} misses of {len(found)} shapes{rest}", highlight=False)
