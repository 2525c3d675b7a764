"""The error of a matrix's conversion from checkpoint to artifact, and its text form."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Conversion:
    """The error that converting matrices introduced.

    types: how the checkpoint stores them.
    error: RMS of the differences divided by RMS of the values.
    most: largest difference divided by the largest magnitude.
    norm: root of the sum of squared values, the weight of `error` in an average.
    """

    types: str
    error: float
    most: float
    norm: float

    def record(self) -> dict[str, Any]:
        """All fields as JSON."""
        return asdict(self)


def conversion_of(record: Mapping[str, Any]) -> Conversion:
    """The inverse of `record`. Raises KeyError, TypeError or ValueError."""
    error, most, norm = (float(record[name]) for name in ("error", "most", "norm"))
    return Conversion(str(record["types"]), error, most, norm)


def error_of(matrices: Sequence[Conversion]) -> float:
    """The relative error of several matrices taken as one."""
    norm = math.hypot(*(one.norm for one in matrices))
    return math.hypot(*(one.error * one.norm for one in matrices)) / norm if norm else 0.0


def error_text(error: float) -> str:
    """The error as text, as in `0.17 %`; `exact` for 0."""
    if not error:
        return "exact"
    # Two significant digits, without an exponent.
    percent = 100 * error
    return f"{percent:.{max(0, 1 - math.floor(math.log10(percent)))}f} %"
