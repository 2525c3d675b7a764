"""--replan of `llmc serve` and its related options."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from llmc.cli.options.numbers import finite
from llmc.runtime.request_error import RequestError
from llmc.units import parse_size

if TYPE_CHECKING:
    from llmc.runtime.replan.options import ReplanOptions


class PlanFor(enum.StrEnum):
    """Quantity to reduce."""

    time = "time"
    tokens = "tokens"


@dataclass(frozen=True)
class ReplanFlags:
    """See docs/buckets.md."""

    replan: Annotated[
        str,
        typer.Option(
            "--replan",
            metavar="off|suggest|auto",
            help="Adapt buckets to this server's traffic: suggest changes, or try them.",
        ),
    ] = "off"
    replan_cost: Annotated[
        PlanFor, typer.Option("--replan-cost", help="Cost to reduce: time of steps, or tokens of padding.")
    ] = PlanFor.time
    replan_interval: Annotated[
        float,
        typer.Option(
            "--replan-interval", min=1, max=86400, metavar="S", callback=finite, help="Seconds between two plans."
        ),
    ] = 60.0
    replan_margin: Annotated[
        float,
        typer.Option(
            "--replan-margin",
            min=0,
            max=99,
            metavar="PCT",
            callback=finite,
            help="Measured saving, in percent, that keeps a tried bucket.",
        ),
    ] = 2.0
    replan_graphs: Annotated[
        int,
        typer.Option("--replan-graphs", min=0, max=1024, metavar="N", help="Graphs in use beyond those at the start."),
    ] = 16
    replan_memory: Annotated[
        str,
        typer.Option(
            "--replan-memory", metavar="SIZE", help="Memory limit of the compiler; 0: half of the free memory."
        ),
    ] = "0"

    def options(self, miss_policy: str) -> ReplanOptions:
        """Raises BadParameter, and ModelPathError for `auto` without the compiler."""
        from llmc.buckets.replanning.proposal import Policy
        from llmc.runtime.replan.options import ReplanOptions, parse_mode

        try:
            mode = parse_mode(self.replan, miss_policy)
        except RequestError as error:
            raise typer.BadParameter(str(error)) from error
        return ReplanOptions(
            mode=mode,
            policy=Policy(unit=self.replan_cost.value),
            interval_s=self.replan_interval,
            margin=self.replan_margin / 100,
            most_graphs=self.replan_graphs,
            memory_bytes=parse_size(self.replan_memory),
        )
