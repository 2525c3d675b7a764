"""Numbers of the command line: what --option takes where not every number that Python reads makes sense."""

from __future__ import annotations

import math

import typer


def finite(value: float | None) -> float | None:
    """The value of an option, as its callback. Raises typer.BadParameter for nan and infinities, which pass every
    comparison with a least or a largest value."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter("must be a finite number")
    return value
