"""The machine's limits, from the same probe as `llmc profile`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Protocol

from llmc.runtime.binding.machine_limits import LIMITS, Probe

ARITHMETIC = tuple(name for name in LIMITS if name != "read")
_EACH = 8  # up to this every number of threads is measured; beyond it, powers of two and the largest
UNITS = {"read": "GB/s", "f32": "GFLOP/s", "bf16": "GFLOP/s", "int8": "GOP/s"}


class Limits(Protocol):
    """Measures a limit in bytes or operations per second; None if the CPU lacks it."""

    def measure(self, limit: str, seconds: float) -> float | None: ...


@cache
def probe(threads: int) -> Probe:
    """The probe of this process, made once."""
    return Probe(threads)


@cache
def supported(threads: int) -> frozenset[str]:
    """Kinds of arithmetic that this CPU has."""
    return frozenset(name for name in ARITHMETIC if probe(threads).measure(name, 0.02) is not None)


def thread_counts(most: int) -> list[int]:
    """Numbers of threads from 1 to `most` to measure, ascending."""
    powers = (1 << bit for bit in range(most.bit_length()))
    return sorted({*range(1, min(most, _EACH) + 1), *powers, most})


def by_threads(counts: Sequence[int], limits: Sequence[str], seconds: float) -> Iterator[tuple[int, str, float | None]]:
    """(threads, limit, bytes or operations per second), each measured for `seconds`; None if the CPU lacks it."""
    for threads in counts:
        with Probe(threads) as one:
            for limit in limits:
                yield threads, limit, one.measure(limit, seconds)
