"""The level of this machine's CPU."""

from __future__ import annotations

from llmc.runtime.binding import library


def machine_level() -> int:
    """The highest level of CPUs (FORMAT.md) whose kernels this process can run; 0 if below the lowest."""
    return int(library().llmc_machine_get_isa_level())
