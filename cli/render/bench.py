"""Tables of `llmc bench`, and its result files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.replaced_file import write_replaced
from llmc.runtime.loadgen.error import BenchError

if TYPE_CHECKING:
    from llmc.runtime.loadgen.measure import Report, Spread

_COLUMNS = ("mean", "std", "p50", "p90", "p95", "p99", "max")


def print_spreads(spreads: Mapping[str, Spread | None], unit: str) -> None:
    """Prints a table with one row per spread. Spreads without values are left out."""
    from rich.table import Table

    from llmc.cli.render.tables import print_table

    table = Table(box=None, pad_edge=False)
    table.add_column(unit)
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for title, spread in spreads.items():
        if spread is not None:
            table.add_row(title, *(_number(getattr(spread, name)) for name in _COLUMNS))
    if table.row_count:
        print_table(table)


def print_report(report: Report, notes: list[str]) -> None:
    """The result of `llmc bench serve` as text on stdout."""
    lines = [
        ("requests", f"{report.completed} completed, {report.failed} failed in {report.duration_s:.2f} s"),
        ("tokens", f"{report.input_tokens} in ({report.cached_tokens} cached), {report.output_tokens} out"),
        ("request throughput", f"{report.requests_per_s:.2f} requests/s"),
        ("output throughput", f"{report.output_tokens_per_s:.1f} tokens/s, "
                              f"peak {report.peak_output_tokens_per_s:.0f} in one second"),
        ("total throughput", f"{report.total_tokens_per_s:.1f} tokens/s"),
        ("peak concurrency", str(report.peak_concurrency)),
    ]  # fmt: skip
    if report.goodput is not None:
        limits = ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in report.goodput_limits_ms.items())
        lines.append(("goodput", f"{report.goodput:.2f} requests/s with {limits}"))
    width = max(len(name) for name, _ in lines) + 2
    for name, value in lines:
        print(f"{name:<{width}}{value}")
    print()
    rows = {"TTFT": report.ttft_ms, "TPOT": report.tpot_ms, "ITL": report.itl_ms, "E2E": report.e2e_ms}
    print_spreads(rows, "ms")
    if report.failures:
        print("\nfailures")
        for cause, count in report.failures.items():
            print(f"  {count} × {cause}: {report.examples[cause]}")
    for note in notes:
        print(f"note: {note}")


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Writes a result as JSON atomically. Raises BenchError."""
    try:
        write_replaced(path, json.dumps(result, indent=1) + "\n")
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror or error}") from error


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.2f}" if abs(value) < 1000 else f"{value:.1f}"
