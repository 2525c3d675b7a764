"""The evidence for a plan: the steps of a phase in several cases, each over several parts of a trace.

A case is a pace, a machine or a way of scheduling that the server may encounter. Cases are weighted by the padding of
rule-based ladders in them, not by steps: a plan should save its share of padding in each. Demand may be blurred before
planning, so that sizes do not fit accidents of a few steps.
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
    """How demand is blurred.

    width: standard deviation of lengths, in octaves. even: weight of uniform demand over all shapes, relative to all
    cases together (1); rule-based ladders suit it best.
    """

    width: float = 0.0
    even: float = 0.0

    def __bool__(self) -> bool:
        return self.width > 0 or self.even > 0


@dataclass(frozen=True, slots=True)
class Case:
    """Steps of one phase in one case.

    parts: demand of each part of the trace; None for none. weight: of the case. own: whether it is the requested case:
    the trace's pace and the given costs.
    """

    name: str
    weight: float
    parts: tuple[Demand | None, ...]
    own: bool = False

    def demand(self, parts: Sequence[int] | None = None) -> Demand | None:
        """Demand of the given parts together, or of all; None if there is none."""
        chosen = range(len(self.parts)) if parts is None else parts
        some = [part for n in chosen if (part := self.parts[n]) is not None]
        return joined(some) if some else None


@dataclass(frozen=True, slots=True)
class Evidence:
    """The cases of one phase.

    folds: parts of the trace left out in turn to test a plan on; empty if there are too few requests.
    """

    phase: str
    cases: tuple[Case, ...]
    folds: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, demand: Demand) -> Evidence:
        """Evidence of a single case in a single part."""
        return cls(demand.phase, (Case("as given", 1.0, (demand,), own=True),))

    @property
    def steps(self) -> float:
        """Steps of the own case, or of all cases without one."""
        own = [case for case in self.cases if case.own and case.demand() is not None]
        return sum(float(d.weight.sum()) for case in own or self.cases if (d := case.demand()) is not None)

    def without(self, fold: int) -> tuple[int, ...]:
        """All parts except those of a fold."""
        left_out = self.folds[fold]
        return tuple(n for n in range(len(self.cases[0].parts)) if n not in left_out)


def joined(demands: Iterable[Demand]) -> Demand:
    """Merges demands of one phase."""
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
    """The demand with `factor` times the steps."""
    return replace(demand, weight=demand.weight * factor, asked=None if demand.asked is None else demand.asked * factor)


def exact_cost(demand: Demand, model: CostModel) -> float:
    """Cost of all steps in buckets of exactly their shape, without the part equal in every bucket."""
    model = TotalCost(model) if demand.total else model
    size = demand.batch, demand.seq
    each = model.cost(demand.phase, *size) + model.load(demand.phase, demand.batch, demand.batch)
    return float(np.sum(demand.weight * each))


def blurred(demand: Demand, width: float, top: int, block_size: int) -> Demand:
    """The demand with lengths spread by `width` octaves, clipped to `top`."""
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
    """Uniform demand: all step shapes that the server admits, equally often."""
    decode = phase == "decode"
    top = server.max_model_len if decode else server.max_chunk
    most = server.max_num_seqs if decode else server.max_prefill_batch
    lengths = np.unique(np.linspace(top / _EVEN_LENGTHS, top, _EVEN_LENGTHS).astype(np.int64).clip(1))
    batches = np.unique(np.linspace(1, most, min(most, _EVEN_BATCHES)).astype(np.int64))
    if not decode:
        batches = batches[:1]
    batch, seq = (axis.ravel() for axis in np.meshgrid(batches, lengths))
    return Demand(phase, batch, seq * batch if total else seq, np.ones(len(seq)), total=total)
