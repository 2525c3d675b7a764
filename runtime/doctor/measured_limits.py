"""Measures this machine's memory and multiplication rates."""

from __future__ import annotations

from collections.abc import Iterator

from llmc.runtime.binding.machine_limits import LIMITS, Probe
from llmc.runtime.doctor.check import Check

SECONDS = 2.0
"""Time for measuring all limits."""
_NAMES = {"read": "memory read", "f32": "f32 peak", "bf16": "bf16 peak", "int8": "int8 peak"}


def measured_limits() -> Iterator[Check]:
    """Rates over all CPUs of this process; None for what the CPU lacks. Raises LlmcError."""
    with Probe() as probe:
        for limit in LIMITS:
            rate = probe.measure(limit, SECONDS / len(LIMITS))
            if rate is None:
                yield Check(_NAMES[limit], "no such instructions")
                continue
            yield Check(_NAMES[limit], f"{rate / 1e9:,.1f} {'GB/s' if limit == 'read' else 'Gop/s'}")
