"""The machine's limits, from the same probe as `llmc profile`."""

from __future__ import annotations

from functools import cache
from typing import Protocol

from llmc.runtime.limits import LIMITS, Probe

ARITHMETIC = tuple(name for name in LIMITS if name != "read")
UNITS = {"read": "GB/s", "f32": "GFLOP/s", "bf16": "GFLOP/s", "int8": "GOP/s"}


class Limits(Protocol):
    """Measures a limit: bytes or operations a second, None where the CPU lacks it."""

    def measure(self, limit: str, seconds: float) -> float | None: ...


@cache
def probe(threads: int) -> Probe:
    """One probe for as long as this process lives."""
    return Probe(threads)


@cache
def supported(threads: int) -> frozenset[str]:
    """The arithmetic that this CPU has."""
    return frozenset(name for name in ARITHMETIC if probe(threads).measure(name, 0.02) is not None)
