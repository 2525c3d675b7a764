"""Sizes and times as people write and read them."""

from __future__ import annotations


def format_bytes(count: float) -> str:
    """1536 → "1.5 KiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
