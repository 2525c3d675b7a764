"""The CPU, and the instructions on it that llmc's kernels use."""

from __future__ import annotations

from collections.abc import Iterator

from llmc.machine import machine_facts, num_cores
from llmc.runtime.binding.devices import Device
from llmc.runtime.binding.handle import isa_level
from llmc.runtime.doctor.check import Check


def processor_checks() -> Iterator[Check]:
    """Raises LlmcError."""
    facts = machine_facts(0)
    yield Check("processor", facts["processor"])
    yield Check("CPUs", f"{facts['cpus']}, on {num_cores()} cores")
    if isa_level() == 0:
        yield Check("instructions", "no AVX2", "no artifact runs here: llmc needs an x86-64 CPU with AVX2 and FMA")
        return
    with Device("cpu") as device:
        yield Check("instructions", device.facts["instructions"])
