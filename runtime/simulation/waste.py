"""`llmc inspect --waste`: cost of each bucket's padding in an artifact, under recorded use or a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.buckets.bucket import Bucket, BucketError
from llmc.buckets.cost_bounds import CONFIDENCE
from llmc.buckets.recorded_use import BucketUse, looks_like_metrics, read_bucket_use


def waste_data(artifact: Path, use: Path) -> dict[str, Any]:
    """Buckets, most expensive padding first. use: a saved /metrics of llmc serve, or a trace, which is simulated.

    Raises BucketError for a file that is neither, and for a trace without measured costs.
    """
    from llmc.runtime.simulation.what_if import artifact_ladder

    ladder = artifact_ladder(artifact)[0]
    if _is_trace(use):
        predicted = _simulated(artifact, use)
        uses, source = predicted.uses, predicted.source
    else:
        uses, source, predicted = read_bucket_use(use), "recorded", None
        unknown = [one.bucket for one in uses if one.bucket not in ladder.buckets]
        if unknown:
            raise BucketError(f"{use} tells of {unknown[0]}, which {artifact} does not have: it is of another artifact")
    total = sum(one.seconds for one in uses)
    rows = [
        {
            "bucket": str(one.bucket),
            "replays": one.replays,
            "seconds": one.seconds,
            "padding": one.padding,
            "padding_s": one.padding_s,
            "padding_share_of_all": one.padding_s / total if total else 0.0,
            **(predicted.intervals[one.bucket] if predicted is not None else {}),
        }
        for one in sorted(uses, key=lambda one: (-one.padding_s, -one.replays, one.bucket))
    ]
    data: dict[str, Any] = {
        "artifact": str(artifact),
        "use": str(use),
        "source": source,
        "seconds": total,
        "buckets": rows,
    }
    if predicted is not None:
        data |= {"confidence": CONFIDENCE, "warnings": list(predicted.notes)}
    return data


def _is_trace(path: Path) -> bool:
    return not looks_like_metrics(path)


@dataclass(frozen=True)
class _Prediction:
    """Uses from a simulated trace. intervals: bounds of seconds, by bucket and name. notes: about the costs."""

    uses: Sequence[BucketUse]
    source: str
    intervals: Mapping[Bucket, dict[str, tuple[float, float]]]
    notes: tuple[str, ...]


def _simulated(artifact: Path, trace: Path) -> _Prediction:
    from llmc.buckets.step_cost import StepCosts
    from llmc.buckets.trace import read_trace
    from llmc.runtime.simulation.what_if import WhatIf, artifact_ladder
    from llmc.runtime.warm_up.cost_tables import measured_table

    ladder, server = artifact_ladder(artifact)
    costs = StepCosts.of_table(measured_table(artifact), "simulated by measured costs")
    outcome = WhatIf(read_trace(trace), server, costs).run(ladder)
    uses = [
        BucketUse(one.bucket, one.replays, one.asked, one.computed - one.asked, one.seconds, one.padding_s)
        for one in outcome.graphs
    ]
    intervals = {}
    for one in outcome.graphs:
        low, high = costs.factors(one.bucket.phase)
        times = {"seconds": one.seconds, "padding_s": one.padding_s}
        intervals[one.bucket] = {f"{name}_interval": (low * s, high * s) for name, s in times.items()}
    return _Prediction(uses, costs.source, intervals, costs.notes)
