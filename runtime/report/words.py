"""Numbers for readers: three digits and a unit."""

from __future__ import annotations

import math

NONE = "–"


def number(value: float | None, digits: int = 3) -> str:
    """As in 0.0123, 1.5, 12,300; a dash for None."""
    if value is None:
        return NONE
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    rounded = round(value, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{rounded:,.{decimals}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return text.replace("-", "−")


def microseconds(value: float) -> str:
    """As in 850 µs, 3.2 ms, 1.2 s."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if value >= size:
            return f"{number(value / size)} {unit}"
    return f"{number(value)} µs"


def byte_count(value: float) -> str:
    """As in 640 bytes, 1.2 MB: decimal, consistent with GB/s."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{number(value / size)} {unit}"
    return f"{value:,.0f} bytes"


def percent(value: float | None) -> str:
    """A share 0 … 1 as in 12.3 %."""
    return NONE if value is None else f"{value * 100:.1f} %"
