"""The time of a step in a bucket under a load, from measured costs or a cost model.

One additive law serves every target: a curve over computed rows, a time per sequence (its last row becomes logits), and
a time per (new token, visible token) pair. If padding is skipped, a step computes its own rows, rounded up to the row
tile, and its own context. If padding is computed, it takes as long as the full bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from llmc.graphs_format import PHASES

from .bucket import MAX_DIM, Bucket, BucketError
from .cost import BucketCost, CostModel, Ints, Lengths, MeasuredCost
from .cost_bounds import bounds
from .cost_table import CostTable, ReplayCost, full_costs
from .cost_trust import refuse_falls, trusted

ROW_UNIT = 8
# Up to this many rows a curve shows the row unit's steps; above, they are negligible.
_STAIRS = 64
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CONTEXTS = (128, 1024, 8192)

Floats = npt.NDArray[np.float64]
Count = TypeVar("Count", float, Floats)


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds by token rows, plus pair_s seconds per (new token, visible token) pair.

    The curve is linear between its points, constant before the first, and continues the last slope.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    pair_s: float = 0.0

    def at(self, rows: npt.ArrayLike) -> Floats:
        """Seconds of `rows` rows without attention pairs."""
        return _along(self.rows, self.seconds, rows)


def _along(knots: npt.ArrayLike, seconds: npt.ArrayLike, rows: npt.ArrayLike) -> Floats:
    """Interpolates a curve: constant before the first point, with the last slope after the last."""
    x, y, wanted = (np.asarray(values, np.float64) for values in (knots, seconds, rows))
    slope = (y[-1] - y[-2]) / (x[-1] - x[-2]) if len(x) > 1 else 0.0
    return np.asarray(np.interp(wanted, x, y) + np.maximum(wanted - x[-1], 0) * slope, np.float64)


def num_pairs(sequences: Count, tokens: Count, context: Count) -> Count:
    """The number of (new token, visible token) pairs: `tokens` in all, `context` per sequence after the step."""
    each = tokens / sequences
    return sequences * (each * context - each * (each - 1) / 2)


@dataclass(frozen=True, slots=True)
class AssumedCost(BucketCost):
    """Costs for an unknown machine: prompt tokens per second, and duration of a decode step."""

    tokens_per_s: float = 20_000.0
    decode_step_s: float = 0.02
    unit: str = "s"

    def cost(self, phase: str, batch: npt.NDArray[np.int64], seq: Lengths) -> Floats:
        size = np.asarray(batch * seq.astype(np.float64), np.float64)
        return np.full_like(size, self.decode_step_s) if phase == "decode" else size / self.tokens_per_s


@dataclass(frozen=True, slots=True)
class LoadCost:
    """The fitted law: rows ascending [R], non-decreasing seconds [R], pair_s by phase, sequence_s per sequence."""

    rows: Floats
    seconds: Floats
    pair_s: Mapping[str, float]
    sequence_s: float = 0.0

    @classmethod
    def fit(cls, costs: Iterable[ReplayCost], tile: int = 1) -> LoadCost:
        """Fits the law to full and partial loads. tile: row unit, in buckets of at least that many rows.

        Loads of equal rows but different contexts and sequences determine pair_s and sequence_s. A phase without such
        loads takes another phase's pair_s. Raises BucketError without costs.
        """
        loads = list(costs)
        if not loads:
            raise BucketError("the cost table is empty: measure at least one bucket of each phase")
        rows = np.array([computed_rows(c.tokens, c.bucket.max_tokens, tile) for c in loads], np.float64)
        pairs = np.array([num_pairs(c.sequences, c.tokens, c.context) for c in loads])
        sequences = np.array([computed_rows(c.sequences, c.bucket.batch, tile) for c in loads], np.float64)
        seconds = np.array([c.seconds for c in loads], np.float64)
        phases = np.array([c.bucket.phase for c in loads])
        names = [str(phase) for phase in np.unique(phases)]
        slopes = _slopes(rows, np.stack([*(pairs * (phases == name) for name in names), sequences]), seconds)
        sequence_s = slopes.pop() or 0.0
        known = [slope for slope in slopes if slope is not None]
        pair_s = {
            name: min(known, default=0.0) if slope is None else slope for name, slope in zip(names, slopes, strict=True)
        }
        # Neither may exceed what a load with many of them took.
        for phase in pair_s:
            mine = (phases == phase) & (pairs > 0)
            pair_s[phase] = min(pair_s[phase], float(np.min(seconds[mine] / pairs[mine])))
        rest = seconds - np.array([pair_s[str(phase)] for phase in phases]) * pairs
        sequence_s = min(sequence_s, max(0.0, float(np.min(rest / sequences))))
        rest = rest - sequence_s * sequences
        knots = np.unique(rows)
        level = np.array([float(np.median(rest[rows == knot])) for knot in knots])
        return cls(knots, np.maximum.accumulate(np.maximum(level, 1e-9)), pair_s, sequence_s)

    def of_loads(self, loads: Iterable[ReplayCost], tile: int = 1) -> Floats:
        """Predicted seconds of each load. tile: as in `fit`."""
        return np.array(
            [
                float(self.at(computed_rows(c.tokens, c.bucket.max_tokens, tile)))
                + self.sequence_s * computed_rows(c.sequences, c.bucket.batch, tile)
                + self.of_pair(c.bucket.phase) * num_pairs(c.sequences, c.tokens, c.context)
                for c in loads
            ]
        )

    def times(self, factor: float) -> LoadCost:
        """The law with all times multiplied by `factor`."""
        pair_s = {phase: seconds * factor for phase, seconds in self.pair_s.items()}
        return LoadCost(self.rows, self.seconds * factor, pair_s, self.sequence_s * factor)

    def at(self, rows: npt.ArrayLike) -> Floats:
        """Seconds of `rows` rows without attention pairs; beyond the last point the last slope continues."""
        return _along(self.rows, self.seconds, rows)

    def of_pair(self, phase: str) -> float:
        """Seconds per pair; for a phase that was not measured, those of prefill."""
        return self.pair_s.get(phase, self.pair_s.get("prefill", min(self.pair_s.values())))


def computed_rows(tokens: int, max_tokens: int, tile: int) -> int:
    """Rows that a graph of max_tokens rows computes for `tokens` tokens if padding is skipped."""
    mine = 1
    while mine < min(max_tokens, tile):
        mine *= 2
    return -(-tokens // mine) * mine


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Costs of any step in any bucket, a `CostModel` in seconds.

    step_s, token_s: seconds outside the replay, per step and per sampled token.
    laws: by phase.
    computed: seconds of full buckets if padding is computed; None if it is skipped.
    source: for display.
    bounds: factors (low, high) by phase around all costs, with the coverage `cost_bounds.CONFIDENCE`; empty if unknown.
    notes: caveats.
    """

    laws: Mapping[str, LoadCost]
    computed: CostModel | None
    step_s: float
    token_s: float
    source: str
    unit: str = "s"
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @classmethod
    def of_table(cls, table: CostTable, source: str) -> StepCosts:
        """Measured costs. Raises BucketError for a table without costs, or one that falls as buckets grow."""
        refuse_falls(table, source)
        costs, note = trusted(table.costs)
        notes = (note,) if note else ()
        if table.padding == "skipped":
            # Such graphs run the same kernels in all phases, so together their loads cover more rows.
            laws = dict.fromkeys(PHASES, LoadCost.fit(costs, ROW_UNIT))
            one = cls(laws, None, table.step_s, table.token_s, source, notes=notes)
            return replace(one, bounds=bounds(costs, _by_law))
        kept = replace(table, costs=costs)
        one = cls(_by_phase(costs), MeasuredCost(kept.full()), table.step_s, table.token_s, source, notes=notes)
        return replace(one, bounds=bounds(full_costs(costs), _by_table))

    def low(self) -> StepCosts:
        """The lower bounds as costs, without bounds of their own."""
        return self._times({phase: low for phase, (low, _) in self.bounds.items()})

    def high(self) -> StepCosts:
        """The upper bounds as costs, without bounds of their own."""
        return self._times({phase: high for phase, (_, high) in self.bounds.items()})

    def factors(self, phase: str) -> tuple[float, float]:
        """(low, high) factors around the costs of a phase; for one that was not measured, those of prefill."""
        return self.bounds.get(phase, self.bounds.get("prefill", (1.0, 1.0)))

    def _times(self, factors: Mapping[str, float]) -> StepCosts:
        default = factors.get("prefill", 1.0)
        laws = {phase: law.times(factors.get(phase, default)) for phase, law in self.laws.items()}
        computed = None if self.computed is None else ScaledCost(self.computed, factors)
        return replace(self, laws=laws, computed=computed, bounds={})

    @classmethod
    def of_model(cls, model: CostModel, source: str) -> StepCosts:
        """Costs by a rule, for buckets whose padding is computed."""
        costs = []
        for phase, batches, seqs in (("prefill", (1,), _ROWS), ("decode", _SEQUENCES, _CONTEXTS)):
            grid = model.cost(phase, np.array(batches)[:, None], np.array(seqs)[None, :])
            for i, batch in enumerate(batches):
                for j, seq in enumerate(seqs):
                    bucket = Bucket(phase, batch, seq)
                    costs.append(ReplayCost(bucket, batch, bucket.max_tokens, seq, float(grid[i, j])))
        return cls(_by_phase(costs), model, 0.0, 0.0, source)

    def cost(self, phase: str, batch: Ints, seq: Lengths) -> Floats:
        """The part that depends only on the buckets (batch, seq): 0 if padding is skipped."""
        if self.computed is not None:
            return self.computed.cost(phase, batch, seq)
        return np.zeros(np.broadcast_shapes(batch.shape, seq.shape))

    def load(self, phase: str, batch: Ints, sequences: Ints) -> Floats:
        """The part for the rows of a decode step, rounded up to the row unit of a bucket of `batch`."""
        shape = np.broadcast_shapes(batch.shape, sequences.shape)
        if self.computed is not None or phase != "decode":
            return np.zeros(shape)
        batch, sequences = np.broadcast_to(batch, shape), np.broadcast_to(sequences, shape)
        seconds = np.zeros(shape)
        for one in np.unique(batch).tolist():
            mine = batch == one
            seconds[mine] = self.curves(Bucket("decode", one, 1))[0].at(sequences[mine])
        return seconds

    def step(self, phase: str, sequences: Ints, length: Lengths) -> Floats:
        """The part that does not depend on the bucket: pairs and, in prefill, rows.

        Prefill buckets of fewer rows than a row unit would actually take a little less.
        """
        shape = np.broadcast_shapes(sequences.shape, length.shape)
        if self.computed is not None:
            return np.zeros(shape)
        count = np.broadcast_to(sequences, shape).astype(np.float64)
        each = np.broadcast_to(length, shape).astype(np.float64)
        tokens = count if phase == "decode" else count * each
        pairs = self._law(phase).of_pair(phase) * num_pairs(count, tokens, each)
        if phase == "decode":
            return np.asarray(pairs, np.float64)
        top = int(min(max(tokens.max(initial=1), ROW_UNIT), MAX_DIM))
        return np.asarray(pairs + self.curves(Bucket(phase, 1, top))[0].at(tokens), np.float64)

    def seconds(self, bucket: Bucket) -> float:
        """Seconds of a replay of the full bucket."""
        if self.computed is not None:
            phase, batch, seq = bucket.phase, bucket.batch, bucket.each
            if phase == "mixed":
                phase, batch = "prefill", 1
            return float(self.computed.cost(phase, np.array([batch]), np.array([seq]))[0])
        law, each = self._law(bucket.phase), 1 if bucket.phase == "decode" else bucket.seq
        sequences = 1 if bucket.phase == "mixed" else bucket.batch
        pairs = num_pairs(sequences, sequences * each, bucket.each)
        return float(law.at(bucket.max_tokens)) + law.sequence_s * sequences + law.of_pair(bucket.phase) * pairs

    def curves(self, bucket: Bucket, row_unit: int = ROW_UNIT) -> tuple[CostCurve, CostCurve]:
        """(curve of the bucket's replay, curve of a replay made for exactly its load).

        Prefill and mixed steps count as one sequence: how many share the rows is unknown here.
        """
        law = self._law(bucket.phase)
        decode = bucket.phase == "decode"

        def at(rows: float, sequences: float) -> float:
            return float(law.at(rows)) + law.sequence_s * (sequences if decode else 1)

        pair_s, top = law.of_pair(bucket.phase), bucket.max_tokens
        knots = sorted({1, top, *(int(row) for row in law.rows if 1 < row < top)})
        exact = CostCurve(tuple(knots), tuple(at(knot, knot) for knot in knots), pair_s)
        if self.computed is not None:
            return CostCurve((top,), (self.seconds(bucket),)), exact
        rows: dict[int, float] = {}
        tile = computed_rows(1, top, row_unit)
        for stair in range(tile, min(top, _STAIRS) + tile, tile):
            rows[stair - tile + 1] = rows[stair] = at(stair, stair)
        for knot in knots:
            if knot > max(rows):
                rows[knot] = at(knot + (tile - 1) / 2, knot + (tile - 1) / 2)
        return CostCurve(tuple(rows), tuple(rows.values()), pair_s), exact

    def _law(self, phase: str) -> LoadCost:
        law = self.laws.get(phase, self.laws.get("prefill"))
        if law is None:
            raise BucketError(f"the cost table has no {phase} bucket: measure at least one")
        return law


@dataclass(frozen=True, slots=True)
class ScaledCost(BucketCost):
    """A model's costs multiplied by factors, per phase; 1 for phases not named."""

    model: CostModel
    factors: Mapping[str, float]
    unit: str = "s"

    def cost(self, phase: str, batch: Ints, seq: Lengths) -> Floats:
        return np.asarray(self.model.cost(phase, batch, seq) * self.factors.get(phase, 1.0), np.float64)


def _by_law(known: Sequence[ReplayCost], loads: Sequence[ReplayCost]) -> Floats:
    """Predicts as if padding is skipped."""
    return LoadCost.fit(known, ROW_UNIT).of_loads(loads, ROW_UNIT)


def _by_table(known: Sequence[ReplayCost], loads: Sequence[ReplayCost]) -> Floats:
    """Predicts as if padding is computed."""
    table = MeasuredCost({cost.bucket: cost.seconds for cost in known})
    return np.array(
        [float(table.cost(c.bucket.phase, np.array([c.bucket.batch]), np.array([c.bucket.each]))[0]) for c in loads]
    )


def _by_phase(costs: Iterable[ReplayCost]) -> dict[str, LoadCost]:
    loads = list(costs)
    return {
        phase: LoadCost.fit(c for c in loads if c.bucket.phase == phase) for phase in {c.bucket.phase for c in loads}
    }


def _slopes(rows: Floats, counts: Floats, seconds: Floats) -> list[float | None]:
    """Seconds per unit of each of `counts` [C, N], from loads of equal rows and different counts.

    Least squares over differences, clipped at 0; None if no such loads differ.
    """
    x, y = np.zeros_like(counts), np.zeros_like(seconds)
    for row in np.unique(rows):
        same = rows == row
        # Relative to the loads' times; otherwise large loads would dominate.
        scale = float(np.mean(seconds[same]))
        x[:, same] = (counts[:, same] - np.mean(counts[:, same], axis=1, keepdims=True)) / scale
        y[same] = (seconds[same] - np.mean(seconds[same])) / scale
    size = np.linalg.norm(x, axis=1)
    found: list[float | None] = [0.0 if one > 1e-9 * np.linalg.norm(size) else None for one in size]
    left = [n for n, one in enumerate(found) if one is not None]
    while left:
        slopes = np.linalg.lstsq((x[left] / size[left, None]).T, y, rcond=1e-6)[0]
        if np.all(slopes >= 0):
            for n, slope in zip(left, slopes, strict=True):
                found[n] = float(slope / size[n])
            break
        left.remove(left[int(np.argmin(slopes))])
    return found
