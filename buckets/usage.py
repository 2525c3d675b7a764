"""The use of a ladder's buckets by the steps of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .bucket import Bucket, area, rank
from .demand import Demand


@dataclass(frozen=True, slots=True)
class BucketUse:
    """Steps that a bucket serves, and the share of its tokens that are padding, 0 … 1."""

    bucket: Bucket
    steps: float
    padding: float


@dataclass(frozen=True, slots=True)
class Usage:
    """Use of each bucket, in the given order. missed: steps that no bucket holds."""

    uses: tuple[BucketUse, ...]
    steps: float
    missed: float


def usage(demand: Demand, buckets: Sequence[Bucket]) -> Usage:
    """Assigns every step to the bucket that the scheduler takes, as `bucket.select` does.

    Where the demand does not tell totals of contexts, every context counts as the longest.
    """
    rectangle = demand.batch * demand.seq
    contexts = rectangle if demand.contexts is None else demand.contexts
    order = sorted(range(len(buckets)), key=lambda n: rank(buckets[n]))
    owner = np.full(len(demand.weight), -1)
    for n in order:
        length = contexts if buckets[n].total else demand.seq
        free = (owner < 0) & (demand.batch <= buckets[n].batch) & (length <= buckets[n].seq)
        owner[free] = n
    uses = []
    for n, bucket in enumerate(buckets):
        mine = owner == n
        steps = float(np.sum(demand.weight[mine]))
        asked = float(np.sum((demand.weight * (contexts if bucket.total else rectangle))[mine]))
        uses.append(BucketUse(bucket, steps, 1 - asked / (steps * area(bucket)) if steps else 0.0))
    return Usage(tuple(uses), float(np.sum(demand.weight)), float(np.sum(demand.weight[owner < 0])))
