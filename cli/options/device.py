"""Options of commands that open a device, except those for CPU threads."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Annotated

import typer


@dataclass(frozen=True)
class DeviceFlags:
    """As in `runtime.binding.devices.DEVICE_OPTIONS`. A device ignores options that its kind does not have."""

    enforce_eager: Annotated[
        bool,
        typer.Option("--enforce-eager", help="Launch kernels one by one instead of replaying graphs. Same bits."),
    ] = False
    device_number: Annotated[
        int | None,
        typer.Option("--device-number", min=0, max=1024, metavar="N", help="Number of the GPU in llmc devices."),
    ] = None
    swap_space: Annotated[
        float,
        typer.Option(
            "--swap-space",
            min=0,
            max=65536,
            metavar="GIB",
            help="On a GPU: host memory for KV blocks of preempted sequences.",
        ),
    ] = 0.0

    cpu_offload_gib: Annotated[
        float,
        typer.Option(
            "--cpu-offload-gib",
            min=0,
            max=65536,
            metavar="GIB",
            help="On a GPU: weights that stay in the host's memory.",
        ),
    ] = 0.0

    ranks: Annotated[
        str | None,
        typer.Option(
            "--ranks",
            metavar="N|LISTS",
            help="Number of ranks, for artifacts with ranks, or the CPUs of each, such as 0-7|8-15.",
        ),
    ] = None

    @property
    def swap_bytes(self) -> int:
        return int(self.swap_space * 2**30)

    def options(self) -> dict[str, int | bool | str | None]:
        """Options for the device."""
        return {
            "eager": self.enforce_eager or None,
            "device_number": self.device_number,
            "offload_mib": ceil(self.cpu_offload_gib * 2**10) or None,
            "ranks": self.ranks,
        }
