"""What steps should reach, and the table that says what they do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.runtime.binding import GraphInfo

TIMES_BASELINE = 2.0
"""How much faster than the baseline each cell should be."""

REPLAY_HOST_US = 10.0
"""What the host may spend on a replay."""


@dataclass(frozen=True)
class Cell:
    """A bucket that is judged. graph: its index. of_limit: the fraction of the limit to reach, by kind of weight."""

    name: str
    graph: int
    floats: float
    quantized: float


def cells(graphs: Sequence[GraphInfo]) -> list[Cell]:
    """The decode buckets of the fewest and of the most sequences, and the largest prefill bucket.

    Among equal ones, that of the longest context. Limits: of one sequence, of 64 at 2,048 tokens, and of 2,048 tokens.
    """
    decode = [i for i, graph in enumerate(graphs) if graph.phase == "decode"]
    prefill = [i for i, graph in enumerate(graphs) if graph.phase == "prefill"]

    def longest(i: int) -> tuple[int, int]:
        return graphs[i].max_seqs, graphs[i].max_blocks_per_seq

    fewest = min(decode, key=lambda i: (graphs[i].max_seqs, -graphs[i].max_blocks_per_seq))
    return [
        Cell("decode, fewest sequences", fewest, 0.85, 0.75),
        Cell("decode, most sequences", max(decode, key=longest), 0.70, 0.70),
        Cell("prefill", max(prefill, key=lambda i: (graphs[i].max_tokens, longest(i))), 0.60, 0.60),
    ]


def table(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """found: by artifact and cell, as the report has them."""
    lines = [
        f"    {'artifact':16} {'cell':26} {'bucket':18} {'of limit':>8} {'goal':>5} {'host':>9} {'of baseline':>11}"
    ]
    for row in found:
        against = f"{row['times_baseline']:10.2f}x" if row["times_baseline"] else f"{'-':>11}"
        reached = "" if row["reached"] else "  below"
        lines.append(
            f"    {row['artifact']:16} {row['cell']:26} {row['bucket']:18} {100 * row['of_limit']:6.1f} % "
            f"{100 * row['goal']:3.0f} % {row['host_us']:6.1f} us {against}{reached}"
        )
    return lines
