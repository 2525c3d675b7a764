"""Prediction intervals for costs, with a stated coverage.

Groups of buckets are left out of the fit in turn and predicted from the rest. The ratio of measured to predicted time
contains both the spread of repeats and the error of interpolation. The split-conformal quantile of these ratios bounds
loads of the same phase within the measured sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from .cost_table import ReplayCost

CONFIDENCE = 0.9
"""Share of predictions within the measured sizes whose true value lies in the interval."""
# Number of groups of buckets left out in turn.
_FOLDS = 10
# With fewer buckets of a phase no error can be learned: assume a factor of two either way.
_FEW, _UNKNOWN = 4, math.log(2)
# With too few ratios for the quantile, the largest ratio counts, but at least this.
_LEAST = math.log(1.25)

Floats = npt.NDArray[np.float64]
Predict = Callable[[Sequence[ReplayCost], Sequence[ReplayCost]], Floats]
"""(costs to learn from, loads to predict) → seconds of each load."""


def bounds(costs: Sequence[ReplayCost], predict: Predict) -> dict[str, tuple[float, float]]:
    """Factors (low, high) per phase: the true cost lies between prediction × low and prediction × high, with
    probability CONFIDENCE.

    Costs measured under load can only be too high, so their disturbed share widens the interval downwards.
    """
    buckets = sorted({cost.bucket for cost in costs})
    counts: dict[str, int] = {}
    fold_of = {}
    for bucket in buckets:
        # Neighbouring buckets fall into different groups.
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
    """The error that the next one exceeds with probability at most 1 − CONFIDENCE."""
    if not errors:
        return _UNKNOWN
    rank = math.ceil(CONFIDENCE * (len(errors) + 1))
    return sorted(errors)[rank - 1] if rank <= len(errors) else max(*errors, _LEAST)


def _disturbed(costs: Sequence[ReplayCost]) -> Mapping[str, float]:
    """Per phase, the largest share of a cost under load that other work took, 0 … 1."""
    found: dict[str, float] = {}
    for cost in costs:
        share = cost.disturbed if cost.under_load else 0.0
        found[cost.bucket.phase] = max(found.get(cost.bucket.phase, 0.0), share)
    return found
