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
    overflows: finite numbers that the new type has as infinities; the others make up all of the above.
    """

    types: str
    error: float
    most: float
    norm: float
    overflows: int = 0

    def record(self) -> dict[str, Any]:
        """All fields as JSON, without a count of nothing."""
        found = asdict(self)
        return found if self.overflows else {name: value for name, value in found.items() if name != "overflows"}


def conversion_of(record: Mapping[str, Any]) -> Conversion:
    """The inverse of `record`. Raises KeyError, TypeError or ValueError."""
    error, most, norm = (float(record[name]) for name in ("error", "most", "norm"))
    return Conversion(str(record["types"]), error, most, norm, int(record.get("overflows", 0)))


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
