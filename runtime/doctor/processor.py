"""The CPU, and the level of instructions on it that llmc's kernels use."""

from __future__ import annotations

from collections.abc import Iterator

from llmc.machine import machine_facts, num_cores
from llmc.runtime.binding.devices import Device
from llmc.runtime.doctor.check import Check


def processor_checks() -> Iterator[Check]:
    """Raises LlmcError."""
    facts = machine_facts(0)
    yield Check("processor", facts["processor"])
    yield Check("CPUs", f"{facts['cpus']}, on {num_cores()} cores")
    with Device("cpu") as device:
        cpu = device.facts
    advice = "no artifact for CPUs runs here: use a machine of that level or above" if cpu["level"] == "0" else None
    yield Check("instructions", cpu["instructions"], advice)
