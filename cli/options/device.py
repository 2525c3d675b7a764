"""Options of commands that open a device, except those for CPU threads."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Annotated

import typer

_MOST_DEVICE_NUMBER = 1024


def _device_numbers(text: str | None) -> str | None:
    for number in () if text is None else text.split(","):
        if not number.isdecimal() or int(number) > _MOST_DEVICE_NUMBER:
            raise typer.BadParameter(
                f"{text!r} is no number from 0 to {_MOST_DEVICE_NUMBER}, nor a list of such as 0,1: see llmc devices"
            )
    return text


def check_overlap_sums(text: str | None) -> str | None:
    """Callback that returns the value. Raises BadParameter."""
    if text is not None:
        from llmc.runtime.binding.devices import overlap_rows
        from llmc.runtime.binding.ranks import RanksError

        try:
            overlap_rows(text)
        except RanksError as error:
            raise typer.BadParameter(str(error)) from error
    return text


@dataclass(frozen=True)
class DeviceFlags:
    """As in `runtime.binding.devices.DEVICE_OPTIONS`."""

    enforce_eager: Annotated[
        bool,
        typer.Option("--enforce-eager", help="Launch kernels one by one instead of replaying graphs. Same bits."),
    ] = False
    device_number: Annotated[
        str | None,
        typer.Option(
            "--device-number",
            metavar="NUMBERS",
            callback=_device_numbers,
            help="Number of the GPU in llmc devices; for several ranks one each, such as 0,1.",
        ),
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
            help="On a GPU: memory to save by weights that stay on the host; CUDA streams them.",
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

    steps_in_flight: Annotated[
        int | None,
        typer.Option(
            "--steps-in-flight",
            min=1,
            max=64,
            metavar="N",
            help="Steps that stages work on at the same time, for artifacts with stages; all stages by default.",
        ),
    ] = None

    overlap_sums: Annotated[
        str | None,
        typer.Option(
            "--overlap-sums",
            metavar="auto|off|ROWS",
            callback=check_overlap_sums,
            help="Steps of so many rows send sums of ranks while they compute; auto measures where that pays.",
        ),
    ] = None

    @property
    def swap_bytes(self) -> int:
        return int(self.swap_space * 2**30)

    def check(self, artifact: Path) -> None:
        """Raises BadParameter for an option that this artifact has no use for, and LlmcError."""
        only_gpus = {"--device-number": self.device_number, "--cpu-offload-gib": self.cpu_offload_gib}
        only_ranks = {"--steps-in-flight": self.steps_in_flight, "--overlap-sums": self.overlap_sums}
        if not any((*only_gpus.values(), *only_ranks.values())):
            return
        from llmc.runtime.binding import Artifact

        with Artifact(artifact) as opened:
            info = opened.info
        for idle, given, why in (
            (info.target_kind == "cpu", only_gpus, "the artifact is for a CPU"),
            (info.num_ranks == 1, only_ranks, "the artifact has no ranks"),
        ):
            for flag, value in given.items():
                if idle and value:
                    raise typer.BadParameter(f"{value} has no effect: {why}; leave it out", param_hint=flag)

    def options(self) -> dict[str, int | bool | str | None]:
        """Options for the device."""
        return {
            "eager": self.enforce_eager or None,
            "device_number": self.device_number,
            "offload_mib": ceil(self.cpu_offload_gib * 2**10) or None,
            "ranks": self.ranks,
            "steps_in_flight": self.steps_in_flight,
            "overlap_sums": self.overlap_sums,
        }
