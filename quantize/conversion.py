"""What a matrix lost between a checkpoint and an artifact, and how that is told."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Conversion:
    """types: what the checkpoint stores it in.
    error: the root mean square of the differences, of that of the values. most: the largest difference, of the largest
    value.
    norm: the root of the sum of the squares of the values, which an error weighs with.
    """

    types: str
    error: float
    most: float
    norm: float

    def record(self) -> dict[str, Any]:
        """All of it, as JSON."""
        return asdict(self)


def conversion_of(record: Mapping[str, Any]) -> Conversion:
    """The conversion whose `record()` it is. Raises KeyError, TypeError and ValueError."""
    error, most, norm = (float(record[name]) for name in ("error", "most", "norm"))
    return Conversion(str(record["types"]), error, most, norm)


def error_of(matrices: Sequence[Conversion]) -> float:
    """The error of some matrices as if they were one."""
    norm = math.hypot(*(one.norm for one in matrices))
    return math.hypot(*(one.error * one.norm for one in matrices)) / norm if norm else 0.0


def error_text(error: float) -> str:
    """As in `0.17 %`; nothing is `exact`."""
    if not error:
        return "exact"
    # Two digits, without an exponent.
    percent = 100 * error
    return f"{percent:.{max(0, 1 - math.floor(math.log10(percent)))}f} %"
