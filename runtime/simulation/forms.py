"""Chooses the form of decode buckets for a trace: bounding the longest context of a step, or the total of all
contexts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from llmc.buckets.bucket import Bucket, BucketLadder, area, whole_blocks
from llmc.buckets.contexts import Contexts
from llmc.buckets.demand import ServerModel
from llmc.runtime.simulation.engine import SimulatedLoad

# A smaller difference is noise: the next trace differs by more.
_CLEARLY = 0.01


@dataclass(frozen=True)
class FormUse:
    """Decode steps of a trace in planned buckets of one form.

    read: context tokens that the graphs have room for, where padding is computed. contexts: context tokens present,
    each in whole blocks or less. cost: of these steps, in the unit of the plan.
    """

    total: bool
    graphs: int
    steps: int
    read: float
    contexts: float
    cost: float

    @property
    def padded(self) -> float:
        """Context tokens that belong to no sequence."""
        return self.read - self.contexts

    @property
    def padding(self) -> float:
        """Share of padding in what the graphs read, 0 … 1."""
        return self.padded / self.read if self.read else 0.0

    @classmethod
    def of(
        cls, ladder: BucketLadder, loads: Iterable[tuple[Bucket, SimulatedLoad]], block_size: int, *, in_seconds: bool
    ) -> FormUse:
        """From replays in the ladder's decode buckets."""
        mine = [(bucket, load) for bucket, load in loads if bucket.phase == "decode"]
        read = sum(load.replays * area(bucket, block_size) for bucket, load in mine)
        return cls(
            total=ladder.decode[0].total,
            graphs=len(ladder.decode),
            steps=sum(load.replays for _, load in mine),
            read=read,
            contexts=sum(load.contexts for _, load in mine),
            cost=sum(load.ns for _, load in mine) / 1e9 if in_seconds else read,
        )


@dataclass(frozen=True)
class FormChoice:
    """Both forms, with the same limit of graphs, on the same stretches of a trace."""

    longest: FormUse
    total: FormUse

    @property
    def suits(self) -> Contexts | None:
        """The cheaper form; None if the difference is at most 1 %."""
        if self.total.cost < self.longest.cost * (1 - _CLEARLY):
            return Contexts.total
        return Contexts.longest if self.longest.cost < self.total.cost * (1 - _CLEARLY) else None


def with_one_total(ladder: BucketLadder, server: ServerModel, block_size: int) -> BucketLadder:
    """The ladder with a single decode bucket, for a total that all requests together never exceed."""
    most = server.max_num_seqs * whole_blocks(server.max_model_len, block_size)
    return replace(ladder, decode=(Bucket("decode", server.max_num_seqs, most, total=True),))
