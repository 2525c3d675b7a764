"""Predicts a step's time in another bucket, from steps that ran in the existing ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from llmc.buckets.bucket import Bucket
from llmc.buckets.cost import MeasuredCost
from llmc.buckets.cost_table import CostTable, ReplayCost
from llmc.buckets.cost_trust import trusted
from llmc.buckets.step_cost import ROW_UNIT, CostCurve, LoadCost, StepCosts, num_pairs
from llmc.graphs_format import PHASES

from .shapes import Limits, ShapeUse, StepShape

MOST_SHAPES = 384
LEAST_STEPS = 4.0
"""Fewer steps than this say nothing about their duration."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Predicted seconds of steps. source: what they were learned from. tiles: row unit by bucket."""

    costs: StepCosts
    limits: Limits
    source: str
    tiles: Mapping[Bucket, int]
    _curves: dict[Bucket, CostCurve] = field(default_factory=dict, repr=False, compare=False)

    def seconds(self, shape: StepShape, bucket: Bucket) -> float:
        """Seconds of one step of this shape in this bucket, compiled or not."""
        curve = self._curve(bucket)
        pairs = num_pairs(float(shape.sequences), float(shape.tokens), max(shape.total / shape.sequences, 1.0))
        return float(curve.at(shape.tokens)) + curve.pair_s * pairs

    def _curve(self, bucket: Bucket) -> CostCurve:
        if bucket not in self._curves:
            whole = bucket
            if bucket.phase == "decode" and not bucket.total:
                whole = Bucket("decode", bucket.batch, self.limits.context(bucket))
            self._curves[bucket] = self.costs.curves(whole, self.tiles.get(bucket, ROW_UNIT))[0]
        return self._curves[bucket]


def learn(
    uses: Iterable[ShapeUse],
    table: CostTable | None,
    limits: Limits,
    *,
    padding: str,
    tiles: Mapping[Bucket, int] | None = None,
) -> StepTimes | None:
    """Fits the law of the measured steps; for buckets without steps, the costs of a table are added.

    padding: "skipped" or "computed", as the target treats it. Returns None if nothing was measured.
    """  # fmt: skip
    measured = [
        ReplayCost(use.bucket, use.shape.sequences, use.shape.tokens,
                   max(1, use.shape.total // use.shape.sequences), use.seconds,
                   max(1, int(use.steps)))
        for use in sorted(uses, key=lambda use: (-use.steps, use.shape, str(use.bucket)))[:MOST_SHAPES]
        if use.bucket is not None and use.seconds > 0 and use.steps >= LEAST_STEPS
        and use.shape.tokens >= use.shape.sequences
    ]  # fmt: skip
    ran = {cost.bucket for cost in measured}
    known = [cost for cost in (trusted(table.costs)[0] if table is not None else ()) if cost.bucket not in ran]
    if not measured and not known:
        return None
    source = " and ".join(
        text for some, text in ((measured, "steps of this server"), (known, "the costs of the warm-up")) if some
    )
    costs = [*measured, *known]
    if padding == "skipped":
        # Such graphs run the same kernels in all phases, so together their loads cover more rows.
        one = StepCosts(dict.fromkeys(PHASES, LoadCost.fit(costs, ROW_UNIT)), None, 0.0, 0.0, source)
    else:
        one = StepCosts(_by_phase(costs), MeasuredCost(_rising(costs)), 0.0, 0.0, source)
    return StepTimes(one, limits, source, dict(tiles or {}))


def _by_phase(costs: Sequence[ReplayCost]) -> dict[str, LoadCost]:
    laws = {
        phase: LoadCost.fit(cost for cost in costs if cost.bucket.phase == phase)
        for phase in {cost.bucket.phase for cost in costs}
    }
    some = next(iter(laws.values()))
    return {phase: laws.get(phase, some) for phase in PHASES}


def _rising(costs: Sequence[ReplayCost]) -> dict[Bucket, float]:
    """Mean replay seconds of each bucket over all its loads, made monotonic in the bucket's size."""
    total: dict[Bucket, list[float]] = {}
    for cost in costs:
        sums = total.setdefault(cost.bucket, [0.0, 0.0])
        sums[0] += cost.seconds * cost.repeats
        sums[1] += cost.repeats
    mean = {bucket: seconds / count for bucket, (seconds, count) in total.items()}

    rising = {bucket: max(mean[one] for one in mean if _within(one, bucket)) for bucket in mean}
    phases = {bucket.phase for bucket in rising}
    # Every phase needs a law; a phase that never ran is assumed to cost what another does.
    for phase in PHASES:
        if phase not in phases:
            least = min(rising, key=lambda bucket: rising[bucket])
            rising[Bucket(phase, least.batch, max(least.seq, least.batch))] = rising[least]
    return rising


def _within(one: Bucket, bucket: Bucket) -> bool:
    """Whether a bucket is no larger than another, in rows and in table entries of a row."""
    return one.phase == bucket.phase and one.batch <= bucket.batch and one.each <= bucket.each
