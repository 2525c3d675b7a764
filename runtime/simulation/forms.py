"""Decode buckets in both forms for one trace: for the longest context of a step, or the total of all contexts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import attrgetter

from llmc.buckets.bucket import Bucket, BucketLadder, area, whole_blocks
from llmc.buckets.contexts import Contexts
from llmc.buckets.demand import ServerModel
from llmc.runtime.simulation.engine import SimulatedLoad
from llmc.runtime.simulation.what_if import asked_tokens

# A smaller difference is noise: the next trace differs by more.
_CLEARLY = 0.01
# Borders between both forms that are tried, of each kind: a trial takes a part of a second.
_BORDERS = 6


@dataclass(frozen=True)
class FormUse:
    """Decode steps of a trace in planned buckets of one form.

    read: context tokens that the graphs have room for, where padding is computed. contexts: context tokens present,
    each in whole blocks or less. rectangle: as many contexts as sequences, each as long as the longest of its step; 0
    for totals. cost: of these steps, in the unit of the plan.
    """

    total: bool
    graphs: int
    steps: int
    read: float
    contexts: float
    rectangle: float
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
            rectangle=sum(asked_tokens(bucket, load) for bucket, load in mine if not bucket.total),
            cost=sum(load.ns for _, load in mine) / 1e9 if in_seconds else read,
        )


@dataclass(frozen=True)
class FormChoice:
    """Planned decode buckets in both forms, with the same limit of graphs, on the same stretches of a trace.

    both: the cheapest ladder that has buckets of both forms; None if none was tried. decode: its buckets.
    """

    longest: FormUse
    total: FormUse
    both: FormUse | None = None
    decode: tuple[Bucket, ...] = ()

    @property
    def suits(self) -> Contexts | None:
        """The cheapest form; None if the pure forms differ by at most 1 % and both together save no more."""
        pure = min(self.longest.cost, self.total.cost)
        if self.both is not None and self.both.cost < pure * (1 - _CLEARLY):
            return Contexts.both
        if self.total.cost < self.longest.cost * (1 - _CLEARLY):
            return Contexts.total
        return Contexts.longest if self.longest.cost < self.total.cost * (1 - _CLEARLY) else None

    @property
    def uneven(self) -> float:
        """Share of sequences × longest context that no sequence has, 0 … 1: what a total does not read."""
        return 1 - self.longest.contexts / self.longest.rectangle if self.longest.rectangle else 0.0

    def why(self, unit: str) -> str:
        """Which form suits the trace, and why: one sentence with figures."""
        suits, pure = self.suits, (self.longest.cost, self.total.cost)
        uneven = f"{self.uneven:.1%} of sequences × longest context belongs to no sequence"
        if suits is Contexts.both and self.both is not None:
            return (
                f"both forms together suit this trace: they save {1 - self.both.cost / min(pure):.1%} of the cost of "
                f"decode steps against the better form alone, in {unit}; {uneven}, but not in steps of every size"
            )
        if suits is not None:
            saved = (
                f"{suits.value} suits this trace: it saves {1 - min(pure) / max(pure):.1%} of the cost of decode steps"
            )
            because = f"{uneven}, and a total does not read it"
            if suits is Contexts.longest:
                because = f"only {uneven}, and its sizes fit these steps better"
            return f"{saved}, in {unit}; {because}"
        alike = f"neither form suits this trace better: their costs differ by less than 1 %, in {unit}"
        if self.uneven < _CLEARLY:
            return f"{alike}; contexts of a step are alike, only {uneven}"
        return f"{alike}; {uneven}, but reading it costs little by these costs"


def with_one_total(ladder: BucketLadder, server: ServerModel, block_size: int) -> BucketLadder:
    """The ladder with a single decode bucket, for a total that all requests together never exceed."""
    most = server.max_num_seqs * whole_blocks(server.max_model_len, block_size)
    return replace(ladder, decode=(Bucket("decode", server.max_num_seqs, most, total=True),))


def in_totals(ladder: BucketLadder, block_size: int) -> BucketLadder:
    """The ladder with each decode bucket replaced by one for a total, with as large a table.

    Of a ladder for the longest context, it never costs more where the table decides: each new bucket has the place of
    the old one in the scheduler's order, and holds every step that the old one holds.
    """
    totals = {Bucket("decode", b.batch, area(b, block_size), total=True) for b in ladder.decode}
    return replace(ladder, decode=tuple(sorted(totals)))


def mixtures(longest: BucketLadder, total: BucketLadder) -> list[BucketLadder]:
    """Ladders of both forms with no more buckets than the larger of the two: one form for small batches and the other
    for large ones, or one for short contexts and the other for long ones. The largest bucket of each form holds all
    steps, so each of these ladders does."""
    most = max(len(longest.decode), len(total.decode))
    found: dict[tuple[Bucket, ...], BucketLadder] = {}
    for size in (attrgetter("batch"), attrgetter("each")):
        sizes = sorted({size(bucket) for bucket in (*longest.decode, *total.decode)})[:-1]
        for border in sizes[:: max(1, -(-len(sizes) // _BORDERS))]:
            for small, large in ((longest, total), (total, longest)):
                low = [bucket for bucket in small.decode if size(bucket) <= border]
                high = [bucket for bucket in large.decode if size(bucket) > border]
                decode = tuple(sorted((*low, *high)))
                # Of a single sequence, both forms are the same.
                if low and high and len(decode) <= most and max(bucket.batch for bucket in low) > 1:
                    found[decode] = replace(longest, decode=decode)
    return list(found.values())
