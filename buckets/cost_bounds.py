"""How far predictions by measured costs may be off: intervals that cover the truth at a stated rate.

Buckets are left out of the fit in turn and predicted by the others. How far their measured times lie from that, as a
ratio, holds both what repeats spread and what a law between measured sizes misses. The quantile of these ratios that
split-conformal prediction asks for then bounds loads of the same phase within the measured sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from .cost_table import ReplayCost

CONFIDENCE = 0.9
"""Share of predictions within the measured sizes whose truth lies in the interval."""
# Buckets are left out by so many groups.
_FOLDS = 10
# With fewer buckets of a phase than this nothing is left to learn an error from: half to double.
_FEW, _UNKNOWN = 4, math.log(2)
# With too few ratios for the quantile the largest counts, and no less than this.
_LEAST = math.log(1.25)

Floats = npt.NDArray[np.float64]
Predict = Callable[[Sequence[ReplayCost], Sequence[ReplayCost]], Floats]
"""(costs to learn from, loads to predict) → seconds of each load."""


def bounds(costs: Sequence[ReplayCost], predict: Predict) -> dict[str, tuple[float, float]]:
    """By phase the factors (low, high) around a prediction between which the truth lies, CONFIDENCE of the time.

    Costs that were measured under load can only be too high: their disturbed share widens the interval downwards.
    """
    buckets = sorted({cost.bucket for cost in costs})
    counts: dict[str, int] = {}
    fold_of = {}
    for bucket in buckets:
        # Neighbours fall into different groups.
        fold_of[bucket] = counts.get(bucket.phase, 0) % _FOLDS
        counts[bucket.phase] = counts.get(bucket.phase, 0) + 1
    errors: dict[str, list[float]] = {phase: [] for phase in counts}
    for fold in range(_FOLDS):
        left_out = [c for c in costs if fold_of[c.bucket] == fold and counts[c.bucket.phase] >= _FEW]
        others = [c for c in costs if fold_of[c.bucket] != fold or counts[c.bucket.phase] < _FEW]
        if not left_out:
            continue
        for cost, seconds in zip(left_out, predict(others, left_out), strict=True):
            errors[cost.bucket.phase].append(abs(math.log(cost.seconds / seconds)))
    disturbed = _disturbed(costs)
    found = {}
    for phase, mine in errors.items():
        width = math.exp(_quantile(mine))
        found[phase] = (1 / width * (1 - disturbed[phase]), width)
    return found


def _quantile(errors: Sequence[float]) -> float:
    """The error that a next one exceeds in at most 1 − CONFIDENCE of all cases."""
    if not errors:
        return _UNKNOWN
    rank = math.ceil(CONFIDENCE * (len(errors) + 1))
    return sorted(errors)[rank - 1] if rank <= len(errors) else max(*errors, _LEAST)


def _disturbed(costs: Sequence[ReplayCost]) -> Mapping[str, float]:
    """The largest share by phase that other work took of a cost under load, 0 … 1."""
    found: dict[str, float] = {}
    for cost in costs:
        share = cost.disturbed if cost.under_load else 0.0
        found[cost.bucket.phase] = max(found.get(cost.bucket.phase, 0.0), share)
    return found
