"""Which form of decode buckets suits a trace: for the longest context of a step, or for the total of all contexts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from llmc.buckets.bucket import Bucket, BucketLadder, area, whole_blocks
from llmc.buckets.contexts import Contexts
from llmc.buckets.demand import ServerModel
from llmc.runtime.simulation.engine import SimulatedLoad

# Less is no difference: the next trace has more.
_CLEARLY = 0.01


@dataclass(frozen=True)
class FormUse:
    """Decode steps of a trace in planned buckets of one form. read: tokens of context that the graphs have room for,
    where padding is computed; contexts: those that there are, each in whole blocks or less; cost: of these steps, in
    the unit of the plan."""

    total: bool
    graphs: int
    steps: int
    read: float
    contexts: float
    cost: float

    @property
    def padded(self) -> float:
        """Tokens of context that are no sequence's."""
        return self.read - self.contexts

    @property
    def padding(self) -> float:
        """Share of what the graphs read, 0 … 1."""
        return self.padded / self.read if self.read else 0.0

    @classmethod
    def of(
        cls, ladder: BucketLadder, loads: Iterable[tuple[Bucket, SimulatedLoad]], block_size: int, *, in_seconds: bool
    ) -> FormUse:
        """What replays of the ladder's decode buckets carried."""
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
    """Both forms, of as many graphs at most, on the same stretches of a trace."""

    longest: FormUse
    total: FormUse

    @property
    def suits(self) -> Contexts | None:
        """The cheaper form; None where neither is by more than 1 %."""
        if self.total.cost < self.longest.cost * (1 - _CLEARLY):
            return Contexts.total
        return Contexts.longest if self.longest.cost < self.total.cost * (1 - _CLEARLY) else None


def with_one_total(ladder: BucketLadder, server: ServerModel, block_size: int) -> BucketLadder:
    """The ladder with a single decode bucket, for a total that all requests together stay below."""
    most = server.max_num_seqs * whole_blocks(server.max_model_len, block_size)
    return replace(ladder, decode=(Bucket("decode", server.max_num_seqs, most, total=True),))
