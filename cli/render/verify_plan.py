"""Planned buckets with rows for guesses, as text and as JSON data."""

from __future__ import annotations

from typing import Any

from llmc.buckets.files import entry
from llmc.buckets.verify_plan import VerifyPlan


def verify_data(plan: VerifyPlan) -> dict[str, Any]:
    """The whole plan as data."""
    return {
        "buckets": [entry(bucket) for bucket in plan.buckets],
        "cost": plan.cost,
        "lower_bound": plan.bound,
        "without_guesses": plan.plain,
        "in_spare_rows": plan.spare,
    }


def print_verify(plan: VerifyPlan, unit: str, max_num_seqs: int, guesses: int, odds: float) -> None:
    """Prints a table on stdout."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from llmc.cli.render.console import Console
    from llmc.cli.render.tables import print_table

    title = f"decoding with up to {guesses} guesses of a sequence, each right with odds {odds:g}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in ("guesses", "added graphs", "cost", "of plain decoding"):
        table.add_column(column, justify="left" if column == "guesses" else "right")
    rows = (("none", 0, plan.plain), ("in spare rows", 0, plan.spare), ("planned", len(plan.buckets), plan.cost))
    for name, graphs, cost in (*rows, ("any buckets", "", plan.bound)):
        table.add_row(name, f"{graphs}", f"{cost:,.4g}", f"{cost / plan.plain:.1%}" if plan.plain > 0 else "")
    console = Console()
    print_table(table, console)
    added = " ".join(f"{bucket.batch}x{bucket.length}" for bucket in plan.buckets) or "none, no bucket saves enough"
    console.print(f"cost in {unit}; added, rows x length: {added}", highlight=False, soft_wrap=True)
    console.print(f"compile with --max-num-seqs {max_num_seqs} --speculate {guesses}", highlight=False)
