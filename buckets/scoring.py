"""What a ladder makes of a demand: every step in the bucket that the scheduler takes for its true length.

Sizes that a plan may choose are aligned; those of other ladders need not be. So steps are scored by their own lengths,
whatever sizes the search works with. A prefill bucket holds lengths up to its seq; a decode graph reads whole KV
blocks, so it holds, and computes, its seq rounded up to them.
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
    """What a ladder makes of the demand: cost in the model's unit, tokens computed, share of steps one bucket holds."""

    cost: float
    tokens: float
    held: float


@dataclass(frozen=True, slots=True)
class Scorer:
    """The steps of one phase by shape.

    batches [B], lengths [L] ascending; steps [B, L + 1]: how many are shorter than each length.
    base: the bucket that every ladder has. max_area: most tokens of a bucket, 0: any.
    step_cost: of all steps, what no bucket changes. asked: their tokens.
    apart [B, L + 1]: cost of `steps` run a sequence at a time in the base bucket, as are prefill steps that no bucket
    holds.
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
        """The demand of one phase, whose lengths decide by themselves or, in decode, by their blocks."""
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
        """Whether a bucket stays within the tokens of one step, and a total has a block for each sequence."""
        if self.base.total and seq < batch * self.block_size:
            return False
        return self.max_area == 0 or batch * seq <= self.max_area

    def outcome(self, buckets: Pairs) -> Outcome:
        """Of the ladder of these (batch, seq), any sizes, and the base bucket.

        In the scheduler's order, a bucket takes of each batch what is longer than all before it held: steps of one
        batch up to some length are always taken together.
        """
        decode = self.phase == "decode"
        opened = {pair for pair in buckets if self.may_open(*pair)} | {(self.base.batch, self.base.seq)}
        # The order of `bucket.rank`, without a Bucket of each: hundreds of ladders are scored for a plan.
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
        # What is left is of prefill, and of more sequences than any bucket holds of such a length.
        rest, apart = (whole[:, -1] - whole[rows, taken[-1]] for whole in (self.steps, self.apart))
        cost = float(np.sum(weight * each)) + float(apart.sum())
        tokens = float(weight.sum(axis=1) @ (seq.astype(np.float64) * (1 if self.base.total else batch)))
        tokens += float(np.sum(rest * self.batches)) * self.base.seq
        total = float(np.sum(self.steps[:, -1]))
        return Outcome(cost + self.step_cost, tokens, 1 - float(rest.sum()) / total if total else 1.0)
