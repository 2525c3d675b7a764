"""--replan of `llmc serve` and what belongs to it."""

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
    """What is to become less."""

    time = "time"
    tokens = "tokens"


@dataclass(frozen=True)
class ReplanFlags:
    """See docs/buckets.md."""

    replan: Annotated[
        str,
        typer.Option(
            "--replan", metavar="off|suggest|auto", help="Buckets for this server's own traffic: proposed, or tried."
        ),
    ] = "off"
    replan_cost: Annotated[
        PlanFor, typer.Option("--replan-cost", help="What they are to lessen: time of steps, or tokens of padding.")
    ] = PlanFor.time
    replan_interval: Annotated[
        float,
        typer.Option("--replan-interval", min=1, max=86400, metavar="S", callback=finite, help="Between two plans."),
    ] = 60.0
    replan_margin: Annotated[
        float,
        typer.Option(
            "--replan-margin", min=0, max=99, metavar="PCT", callback=finite, help="What a bucket must save to stay."
        ),
    ] = 2.0
    replan_graphs: Annotated[
        int,
        typer.Option("--replan-graphs", min=0, max=1024, metavar="N", help="Graphs in use, more than at the start."),
    ] = 16
    replan_memory: Annotated[
        str, typer.Option("--replan-memory", metavar="SIZE", help="Of the compiler; 0: half of what is free.")
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
