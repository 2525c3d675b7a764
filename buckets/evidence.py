"""What a plan rests on: the steps of a phase in several cases, each seen in several parts of a trace.

A case is a pace, a machine or a way of scheduling that the server may meet. Cases count by what ladders by rule pad in
them, not by their steps: a plan is to save its share of the padding in each. Demand may be blurred before it is planned
for, so that sizes do not sit on the accidents of a few steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .cost import CostModel, TotalCost
from .demand import Demand, ServerModel

# Normal weights at these multiples of the width.
_OFFSETS = (-1.5, -0.75, 0.0, 0.75, 1.5)
_EVEN_LENGTHS = 128
_EVEN_BATCHES = 16


@dataclass(frozen=True, slots=True)
class Blur:
    """How demand is blurred. width: standard deviation of the lengths, in octaves. even: weight of steps of all shapes,
    as often as each other, beside cases of weight 1 together; ladders by rule are best for those."""

    width: float = 0.0
    even: float = 0.0

    def __bool__(self) -> bool:
        return self.width > 0 or self.even > 0


@dataclass(frozen=True, slots=True)
class Case:
    """Steps of one phase in one case. parts: what each part of the trace asks for, None: nothing. weight: of the case.

    own: the case that was asked for, the pace of the trace by the costs given.
    """

    name: str
    weight: float
    parts: tuple[Demand | None, ...]
    own: bool = False

    def demand(self, parts: Sequence[int] | None = None) -> Demand | None:
        """Of some parts together, or of all; None: nothing."""
        chosen = range(len(self.parts)) if parts is None else parts
        some = [part for n in chosen if (part := self.parts[n]) is not None]
        return joined(some) if some else None


@dataclass(frozen=True, slots=True)
class Evidence:
    """The cases of one phase. folds: parts of the trace by turns left out to see how a plan does on the others; empty:
    there are too few requests for that."""

    phase: str
    cases: tuple[Case, ...]
    folds: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, demand: Demand) -> Evidence:
        """One case, seen once."""
        return cls(demand.phase, (Case("as given", 1.0, (demand,), own=True),))

    @property
    def steps(self) -> float:
        """Steps of the own case, or of all where it has none."""
        own = [case for case in self.cases if case.own and case.demand() is not None]
        return sum(float(d.weight.sum()) for case in own or self.cases if (d := case.demand()) is not None)

    def without(self, fold: int) -> tuple[int, ...]:
        """All parts but those of a fold."""
        left_out = self.folds[fold]
        return tuple(n for n in range(len(self.cases[0].parts)) if n not in left_out)


def joined(demands: Iterable[Demand]) -> Demand:
    """Demands of one phase as one."""
    many = list(demands)
    if len(many) == 1:
        return many[0]
    return Demand(
        many[0].phase,
        np.concatenate([one.batch for one in many]),
        np.concatenate([one.seq for one in many]),
        np.concatenate([one.weight for one in many]),
        np.concatenate([one.asked_each for one in many]),
        many[0].total,
    )


def scaled(demand: Demand, factor: float) -> Demand:
    """So many times as many steps."""
    return replace(demand, weight=demand.weight * factor, asked=None if demand.asked is None else demand.asked * factor)


def exact_cost(demand: Demand, model: CostModel) -> float:
    """Of all steps in buckets of exactly their shapes, without what they cost in any bucket."""
    model = TotalCost(model) if demand.total else model
    size = demand.batch, demand.seq
    each = model.cost(demand.phase, *size) + model.load(demand.phase, demand.batch, demand.batch)
    return float(np.sum(demand.weight * each))


def blurred(demand: Demand, width: float, top: int, block_size: int) -> Demand:
    """The demand with lengths spread by `width` octaves; none above top."""
    if width == 0:
        return demand
    share = np.exp(-np.square(_OFFSETS) / 2)
    share /= share.sum()
    seqs = [
        np.clip(np.ceil(demand.seq * 2 ** (width * offset) / block_size) * block_size, 1, top).astype(np.int64)
        if offset
        else demand.seq
        for offset in _OFFSETS
    ]
    return Demand(
        demand.phase,
        np.tile(demand.batch, len(seqs)),
        np.concatenate(seqs),
        np.concatenate([demand.weight * one for one in share]),
        total=demand.total,
    )


def even(phase: str, server: ServerModel, total: bool = False) -> Demand:
    """Steps of all shapes that the server admits, as many of each."""
    decode = phase == "decode"
    top = server.max_model_len if decode else server.max_chunk
    most = server.max_num_seqs if decode else server.max_prefill_batch
    lengths = np.unique(np.linspace(top / _EVEN_LENGTHS, top, _EVEN_LENGTHS).astype(np.int64).clip(1))
    batches = np.unique(np.linspace(1, most, min(most, _EVEN_BATCHES)).astype(np.int64))
    if not decode:
        batches = batches[:1]
    batch, seq = (axis.ravel() for axis in np.meshgrid(batches, lengths))
    return Demand(phase, batch, seq * batch if total else seq, np.ones(len(seq)), total=total)
