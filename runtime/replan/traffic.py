"""The steps to plan for: of a running server, or of a simulated trace."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.buckets.bucket import Bucket, BucketError, whole_blocks
from llmc.buckets.replanning.candidates import rounded
from llmc.buckets.replanning.costs import StepTimes, learn
from llmc.buckets.replanning.proposal import Ladder, planned_uses
from llmc.buckets.replanning.shapes import Limits, ShapeUse, StepShape
from llmc.regular_file import JsonError, parse_json
from llmc.runtime.address import Address, UrlError, why_not_connected
from llmc.runtime.binding import Artifact
from llmc.runtime.replan.steps import LadderFacts
from llmc.runtime.simulation.engine import SimulatedLoad
from llmc.shown import shown

PATH = "/v1/llmc/replan"
_MOST_BYTES = 1 << 26
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Traffic:
    """The input of `propose`. state: of a server; None for a trace."""

    uses: Sequence[ShapeUse]
    ladder: Ladder
    times: StepTimes | None
    observed_s: float
    state: Mapping[str, Any] | None = None


def of_server(url: str, api_key: str | None = None) -> Traffic:
    """Queries a server that watches its steps. Raises BucketError if it does not answer, does not watch, or is not a
    server of llmc."""
    try:
        parsed = Address.parse(url)
    except UrlError as error:
        raise BucketError(str(error)) from error
    address = parsed.origin + parsed.prefix
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(f"{address}{PATH}?steps=true", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            data = response.read(_MOST_BYTES)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            why = "it does not watch its steps: start it with --replan suggest"
        elif error.code == 401:
            why = "it wants a key: give --api-key"
        else:
            why = f"it answered {error.code}"
        raise BucketError(f"{address} did not report its steps: {why}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        if isinstance(reason, OSError):
            reason = why_not_connected(reason)
        raise BucketError(f"{address} does not answer: {reason}") from None
    try:
        state = parse_json(data)
        return _parsed(state)
    except (JsonError, KeyError, TypeError, ValueError) as error:
        raise BucketError(f"{address}{PATH} does not tell of steps as llmc serve does: {shown(str(error))}") from None


def _parsed(state: Any) -> Traffic:
    limits = Limits(int(state["max_model_len"]), int(state["max_num_seqs"]), int(state["block_size"]))
    if min(limits.max_model_len, limits.max_num_seqs, limits.block_size) < 1:
        raise ValueError("a limit is not positive")
    uses = [_use(row) for row in state["steps"]]
    graphs = {Bucket.parse(row["bucket"]): row for row in state["graphs"]}
    ladder = Ladder(
        on=tuple(Bucket.parse(text) for text in state["on"]),
        limits=limits,
        off=tuple(Bucket.parse(text) for text in state["off"]),
        padding=str(state["padding"]),
        arena_bytes={bucket: int(row["arena_bytes"]) for bucket, row in graphs.items()},
        command_bytes={bucket: int(row["command_bytes"]) for bucket, row in graphs.items()},
        tiles={bucket: int(row["row_unit"]) for bucket, row in graphs.items() if row["row_unit"] is not None},
    )
    planned = planned_uses(uses, ladder, "time")
    times = learn(planned, None, limits, padding=ladder.padding, tiles=ladder.tiles)
    return Traffic(uses, ladder, times, float(state["observed_s"]), state)


def _use(row: Mapping[str, Any]) -> ShapeUse:
    counts = [*(row[name] for name in ("sequences", "tokens", "samples", "context")), row.get("total", 0)]
    if not all(isinstance(count, int) and 0 <= count < 1 << 31 for count in counts) or counts[0] < 1 or counts[1] < 1:
        raise ValueError(f"a step has {counts}")
    bucket = None if row["bucket"] is None else Bucket.parse(row["bucket"])
    Bucket(row["phase"], 1, 1)  # validates the phase
    return ShapeUse(StepShape(row["phase"], *counts), bucket, float(row["steps"]), float(row["seconds"]))


def of_trace(artifact: Path, trace: Path) -> Traffic:
    """Simulates a trace on an artifact's ladder, with its measured costs, or assumed ones, which give no times. Raises
    the errors of reading them."""
    from llmc.buckets.step_cost import AssumedCost, StepCosts
    from llmc.buckets.trace import read_trace
    from llmc.runtime.simulation.what_if import WhatIf, artifact_ladder

    simulated, server = artifact_ladder(artifact)
    with Artifact(artifact) as opened:
        facts = LadderFacts.of_artifact(artifact, opened.info)
        ladder = facts.ladder(opened.graphs(), ())
    if facts.table is not None:
        costs, source = StepCosts.of_table(facts.table, "the costs of the warm-up"), "the costs of the warm-up"
    else:
        costs, source = StepCosts.of_model(AssumedCost(), "assumed costs"), ""
    read = read_trace(trace)
    what_if = WhatIf(read, server, costs)
    uses: dict[tuple[StepShape, Bucket], list[float]] = {}
    for load in what_if.loads(simulated):
        bucket = ladder.on[load.graph]
        shape = _shape(bucket, load, facts.limits)
        sums = uses.setdefault((shape, bucket), [0.0, 0.0])
        sums[0] += load.replays
        sums[1] += load.ns / 1e9
    counted = [
        ShapeUse(shape, bucket, steps, seconds / steps if source else 0.0)
        for (shape, bucket), (steps, seconds) in sorted(uses.items())
    ]
    times = StepTimes(costs, facts.limits, source, dict(facts.tiles)) if source else None
    arrivals = read.arrival_s
    return Traffic(counted, ladder, times, float(arrivals[-1] - arrivals[0]) if len(arrivals) else 0.0)


def _shape(bucket: Bucket, load: SimulatedLoad, limits: Limits) -> StepShape:
    """Groups similar loads by their means: a simulation does not report each."""
    sequences, replays = load.num_seqs, load.replays
    if bucket.phase == "decode":
        # Of a bucket for a total, loads tell only the mean of the longest contexts.
        length = -(-load.longest // replays) if bucket.total else load.length
        longest = whole_blocks(length, limits.block_size)
        total = rounded(-(-load.blocks * limits.block_size // replays), limits.block_size)
        return StepShape("decode", sequences, sequences, sequences, longest, min(total, sequences * longest))
    longest = min(max(load.length, round(load.contexts / (replays * sequences))), limits.max_model_len)
    rows = max(sequences, round(load.tokens / replays))
    return StepShape(bucket.phase, sequences, rows, sequences, whole_blocks(longest, limits.block_size))
