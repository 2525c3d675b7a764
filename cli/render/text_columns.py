"""Plain aligned columns."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Plain aligned columns; numbers are right-aligned."""
    cells = [[str(c) for c in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]
    right = [all(isinstance(row[i], int) for row in rows) and bool(rows) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        parts = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)]
        return "  " + "  ".join(parts).rstrip()

    return "\n".join([line(header), *map(line, cells)])
