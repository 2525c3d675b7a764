"""A profile as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from llmc.cli.render.console import Console
from llmc.cli.render.tables import print_table
from llmc.runtime.profile.report import SHARES

_UNITS = {"read": "GB/s", "f32": "GFLOP/s", "bf16": "GFLOP/s", "int8": "GOP/s"}


def print_profile(data: dict[str, Any], top: int) -> None:
    """Prints the profile on stdout. top: number of commands to list."""
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    step, replay, tokens = data["step_us"], data["replay"], sum(s["tokens"] for s in data["sequences"])
    console.print(
        f"{data['bucket']}: {len(data['sequences'])} sequences, {tokens} new tokens, {data['threads']} threads, "
        f"{step['replays']} replays of {step['min'] / 1e3:.3f}–{step['max'] / 1e3:.3f} ms; "
        f"the median one took {replay['us'] / 1e3:.3f} ms"
    )
    known = [f"{name} {rate / 1e9:.1f} {_UNITS[name]}" for name, rate in data["limits"].items() if rate is not None]
    console.print(f"limits, measured before and after: {', '.join(known)}")
    shares = ", ".join(f"{name} {replay[f'{name}_share']:.2%}" for name in SHARES)
    console.print(f"thread 0: {shares}")
    if data["sums"] is not None:
        console.print(_sums_text(data["sums"]))
    console.print()

    def listing(title: str, rows: Iterable[dict[str, Any]], lead: Callable[[dict[str, Any]], Sequence[str]]) -> None:
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        heads = ("", "n") if title != _COMMANDS else ("", "layer")
        for head in (*heads, "us", "% of step", "wait us", "MB", "GB/s", "MFLOP", "GFLOP/s", "% of limit"):
            table.add_column(head, justify="left" if not head else "right")
        for row in rows:
            share = f"{row['of_limit']:.0%} {row['limit'] or ''}".rstrip() if row["of_limit"] is not None else "–"
            table.add_row(
                *lead(row),
                f"{row['us']:.1f}",
                f"{row['us'] / replay['us']:.1%}",
                f"{row['barrier_wait_us']:.1f}",
                f"{row['bytes'] / 1e6:.3f}",
                _number(row["gb_per_s"]),
                f"{row['flops'] / 1e6:.2f}" if row["flops"] else "–",
                _number(row["gflop_per_s"]),
                share,
            )
        print_table(table, console)
        console.print()

    listing("families", data["families"], lambda row: (row["name"], str(row["commands"])))
    listing("kernels", data["kernels"], lambda row: (row["name"], str(row["commands"])))
    slowest = sorted(data["commands"], key=lambda row: -row["us"])[:top]
    count = data["threads"]
    waits = [
        {**row, "barrier_wait_us": sum(row["imbalance_us_per_thread"] + row["sync_us_per_thread"]) / count}
        for row in slowest
    ]
    listing(_COMMANDS, waits, lambda row: (f"{row['index']:4d} {row['op']}", _layer(row["layer"])))
    table = Table(title="threads", title_justify="left", box=None, pad_edge=False)
    for head in ("", *(f"{name} us" for name in SHARES)):
        table.add_column(head, justify="left" if not head else "right")
    for row in data["per_thread"]:
        table.add_row(str(row["thread"]), *(f"{row[f'{name}_us']:.1f}" for name in SHARES))
    print_table(table, console)


def _sums_text(sums: dict[str, Any]) -> str:
    rows = sums["overlap_rows"]
    parts = f"steps of {rows} rows and more run in two parts" if rows else "steps run in one part"
    return (
        f"sums over ranks: {sums['count']:.0f} a step, {sums['exposed_us'] / 1e3:.3f} ms in them and "
        f"{sums['hidden_us'] / 1e3:.3f} ms beside kernels; {parts}"
    )


_COMMANDS = "commands, slowest first"


def _layer(layer: int) -> str:
    return "–" if layer < 0 else str(layer)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
