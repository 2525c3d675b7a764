"""Plans additional decode buckets with rows for draft tokens ("guesses").

A step of n sequences with k guesses each has n × (k + 1) rows and yields n × (1 + p + … + p^k) tokens. p is the
probability that a guess is right, given that those before it are. Each step uses the number of guesses, possibly 0,
that makes its tokens cheapest. The value of a bucket is the time it saves over all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .bucket import Bucket, BucketError, whole_blocks
from .cost import CostModel
from .demand import Demand
from .verify_buckets import DEFAULT_ODDS, MAX_GUESSES, doubling, rows_of

Floats = npt.NDArray[np.float64]

DEFAULT_MAX_GRAPHS = 8
# A bucket that saves a smaller share of decode time is not worth its graph.
LEAST_SAVING = 0.005


@dataclass(frozen=True, slots=True)
class VerifyPlan:
    """buckets: those to add, most valuable first. All other fields are costs of all tokens of the demand, in the
    model's unit.
    plain: without guesses. spare: with guesses only in the ladder's own rows. cost: with the added buckets. bound: a
    lower bound for any buckets.
    """

    buckets: tuple[Bucket, ...]
    plain: float
    spare: float
    cost: float
    bound: float


def plan_verify(
    demand: Demand,
    decode: Sequence[Bucket],
    model: CostModel,
    *,
    guesses: int,
    odds: float = DEFAULT_ODDS,
    max_num_seqs: int,
    block_size: int,
    most: int = DEFAULT_MAX_GRAPHS,
) -> VerifyPlan:
    """Chooses up to `most` buckets to add to `decode`, which holds every step of the demand (steps of plain decoding).

    Added buckets are of the demand's form: for the longest context, or for a total. Raises BucketError for guesses or
    odds out of range.
    """
    if not 1 <= guesses <= MAX_GUESSES:
        raise BucketError(f"speculate {guesses} is out of range: use 1 to {MAX_GUESSES} guesses")
    if not 0 < odds < 1:
        raise BucketError(f"acceptance {odds:g} is out of range: use more than 0 and less than 1")
    times = _Times.of(demand, model, guesses, odds, block_size)
    lengths = doubling(sorted({bucket.seq for bucket in decode if bucket.total == demand.total}))
    known = set(decode)
    rows = rows_of(max_num_seqs, guesses)
    sizes = [Bucket("decode", batch, seq, demand.total) for batch in rows for seq in lengths]
    # A graph has a block for each row, since each might be a sequence.
    candidates = [b for b in sizes if b not in known and (not b.total or b.seq >= b.batch * block_size)]
    plain = np.min([times.of_bucket(bucket, 0) for bucket in decode], axis=0)
    now = np.min([times.of_bucket(bucket, guesses) for bucket in decode], axis=0)
    each = [times.of_bucket(bucket, guesses) for bucket in candidates]
    spare, bound = times.total(now), times.total(np.min([now, *each], axis=0))
    chosen = _choose(times, now, each, most, LEAST_SAVING * times.total(plain))
    cost = times.total(np.min([now, *(each[i] for i in chosen)], axis=0))
    return VerifyPlan(tuple(candidates[i] for i in chosen), times.total(plain), spare, cost, bound)


def _choose(times: _Times, now: Floats, each: list[Floats], most: int, least: float) -> list[int]:
    """Greedily adds buckets, then swaps while that saves; drops those that save less than `least`."""
    chosen: list[int] = []

    def total(some: Sequence[int]) -> float:
        return times.total(np.min([now, *(each[i] for i in some)], axis=0))

    cost = total(chosen)
    while len(chosen) < min(most, len(each)):
        better, added = min((total([*chosen, i]), i) for i in range(len(each)) if i not in chosen)
        if cost - better < least:
            break
        chosen, cost = [*chosen, added], better
    improved = True
    while improved:
        improved = False
        for place in range(len(chosen)):
            others = chosen[:place] + chosen[place + 1 :]
            better, added = min((total([*others, i]), i) for i in range(len(each)) if i not in others)
            if better < cost * (1 - 1e-9):
                chosen[place], cost, improved = added, better, True
    return chosen


@dataclass(frozen=True, slots=True)
class _Times:
    """Steps of plain decoding by shape: sequences, length in whole blocks (of the longest context, or of all if
    `shared`), weight, [P] each.

    tokens [K + 1]: tokens per sequence from a step with each number of guesses.
    """

    sequences: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    weight: Floats
    tokens: Floats
    model: CostModel
    shared: bool

    @classmethod
    def of(cls, demand: Demand, model: CostModel, guesses: int, odds: float, block_size: int) -> _Times:
        shapes = np.stack([demand.batch, whole_blocks(demand.seq, block_size)])
        (sequences, length), where = np.unique(shapes, axis=1, return_inverse=True)
        weight = np.zeros(len(sequences))
        np.add.at(weight, where.ravel(), demand.weight)
        tokens = np.cumsum(odds ** np.arange(guesses + 1))
        return cls(sequences, length, weight, tokens, model, demand.total)

    def total(self, each: Floats) -> float:
        return float(np.sum(self.weight * each))

    def of_bucket(self, bucket: Bucket, most: int) -> Floats:
        """Time of a plain step's tokens in a bucket, with the cheapest number of guesses up to `most`: [P]; infinite if
        it does not fit."""
        batch, each = np.array([[bucket.batch]]), np.array([[bucket.each]])
        rows = self.sequences[:, None] * np.arange(1, most + 2)
        # Where the other length is unknown: contexts as long as the longest, or one that has all of the total.
        length = self.length * (self.sequences if bucket.total and not self.shared else 1)
        held = (rows <= bucket.batch) & (length[:, None] <= bucket.seq)
        inside = np.minimum(rows, bucket.batch)
        seconds = self.model.cost("decode", batch, each) + self.model.load("decode", batch, inside)
        context = self.length / self.sequences if self.shared else self.length
        seconds = seconds + self.model.step("decode", inside, context[:, None])
        best: Floats = np.min(np.where(held, seconds / self.tokens[: most + 1], np.inf), axis=1)
        return best
