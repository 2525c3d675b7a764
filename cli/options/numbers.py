"""Checks on numbers of the command line that Python accepts but an option must not."""

from __future__ import annotations

import math

import typer


def finite(value: float | None) -> float | None:
    """Callback that returns the value. Raises typer.BadParameter for nan and infinities, which pass every range
    check."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter("must be a finite number")
    return value
