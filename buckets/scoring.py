"""Scores a ladder on a demand: each step runs in the bucket that the scheduler takes for its true length.

Plans choose aligned sizes; other ladders need not. So steps are scored by their own lengths, not by the sizes of the
search. A prefill bucket holds lengths up to its seq. A decode graph reads whole KV blocks, so it holds and computes its
seq rounded up to blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .bucket import Bucket, whole_blocks
from .cost import CostModel
from .demand import Demand

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Pairs = Iterable[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A ladder's result: cost in the model's unit, tokens computed, and share of steps that a single bucket holds."""

    cost: float
    tokens: float
    held: float


@dataclass(frozen=True, slots=True)
class Scorer:
    """The steps of one phase by shape.

    batches [B], lengths [L] ascending. steps [B, L + 1]: the number of steps shorter than each length.
    base: the bucket in every ladder. max_area: most tokens of a bucket; 0 for no limit.
    step_cost: the part of all steps' cost that no bucket changes. asked: their tokens.
    apart [B, L + 1]: cost of `steps` run one sequence at a time in the base bucket, like prefill steps that miss.
    """

    phase: str
    batches: Ints
    lengths: Ints
    steps: Floats
    apart: Floats
    base: Bucket
    max_area: int
    model: CostModel
    step_cost: float
    asked: float
    block_size: int

    @classmethod
    def of(cls, demand: Demand, base: Bucket, max_area: int, model: CostModel, block_size: int) -> Scorer:
        """Groups the demand of one phase by exact length or, in decode, by blocks."""
        seq = whole_blocks(demand.seq, block_size) if demand.phase == "decode" else demand.seq
        batches, rows = np.unique(demand.batch, return_inverse=True)
        lengths, columns = np.unique(seq, return_inverse=True)
        counts = np.zeros((len(batches), len(lengths) + 1))
        np.add.at(counts, (rows, columns + 1), demand.weight)
        step_cost = float(np.sum(demand.weight * model.step(demand.phase, demand.batch, demand.seq)))
        apart = np.zeros_like(counts)
        if demand.phase == "prefill":
            one, many, columns = np.array([[base.batch]]), batches[:, None], lengths[None, :]
            alone = model.cost("prefill", one, np.array([[base.seq]])) + model.load("prefill", one, one)
            alone = many * (alone + model.step("prefill", one, columns)) - model.step("prefill", many, columns)
            apart[:, 1:] = counts[:, 1:] * np.maximum(alone, 0.0)
        steps, apart = (np.cumsum(values, axis=1) for values in (counts, apart))
        return cls(
            demand.phase, batches, lengths, steps, apart, base, max_area, model, step_cost, demand.tokens, block_size
        )

    def may_open(self, batch: int, seq: int) -> bool:
        """Whether a bucket stays within the token limit of a step, and a total has a block per sequence."""
        if self.base.total and seq < batch * self.block_size:
            return False
        return self.max_area == 0 or batch * seq <= self.max_area

    def outcome(self, buckets: Pairs) -> Outcome:
        """The outcome of a ladder: these (batch, seq) pairs, of any sizes, and the base bucket.

        In the scheduler's order, a bucket takes from each batch the lengths beyond those held by earlier buckets. So
        the steps of one batch up to some length are always taken.
        """
        decode = self.phase == "decode"
        opened = {pair for pair in buckets if self.may_open(*pair)} | {(self.base.batch, self.base.seq)}
        # Columns of `steps` up to which each bucket takes each batch [K, B], and up to which earlier buckets did.
        order = sorted(opened, key=lambda pair: (pair[0], pair[1]) if decode else (pair[0] * pair[1], pair[0]))
        batch, seq = np.array(order).T
        seq = whole_blocks(seq, self.block_size) if decode else seq
        # Columns of `steps` up to which each bucket takes each batch [K, B], and those before it took.
        upto = np.where(batch[:, None] >= self.batches, np.searchsorted(self.lengths, seq, "right")[:, None], 0)
        taken = np.maximum.accumulate(upto, axis=0)
        rows = np.arange(len(self.batches))
        weight = np.diff(self.steps[rows, taken], axis=0, prepend=0.0)
        load = self.model.load(self.phase, batch[:, None], self.batches[None, :])
        each = self.model.cost(self.phase, batch, seq)[:, None] + load
        # The rest is prefill, with more sequences of such a length than any bucket holds.
        rest, apart = (whole[:, -1] - whole[rows, taken[-1]] for whole in (self.steps, self.apart))
        cost = float(np.sum(weight * each)) + float(apart.sum())
        tokens = float(weight.sum(axis=1) @ (seq.astype(np.float64) * (1 if self.base.total else batch)))
        tokens += float(np.sum(rest * self.batches)) * self.base.seq
        total = float(np.sum(self.steps[:, -1]))
        return Outcome(cost + self.step_cost, tokens, 1 - float(rest.sum()) / total if total else 1.0)
