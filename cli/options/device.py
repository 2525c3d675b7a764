"""Options of the commands that open a device, beside those of a CPU's threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer


@dataclass(frozen=True)
class DeviceFlags:
    """As in `runtime.binding.devices.DEVICE_OPTIONS`: those that a kind of device does not have change nothing."""

    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", help="On a GPU: launch kernels one by one, record no graphs. Same bits.")
    ] = False
    device_number: Annotated[
        int | None,
        typer.Option("--device-number", min=0, max=1024, metavar="N", help="Which GPU: its number in llmc devices."),
    ] = None

    def options(self) -> dict[str, int | bool | None]:
        """What an engine is given."""
        return {"eager": self.enforce_eager or None, "device_number": self.device_number}
