"""What a step takes in a bucket under a load, from measured costs or a model of costs.

One additive law serves every target: a curve over the rows that are computed, plus a time for each pair of a new token
and a token that it sees. Where padding is skipped, a step computes its own rows, rounded up to the row tile, and
sees its own context; where padding is computed, it takes what the full bucket takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .bucket import PHASES, Bucket, BucketError
from .cost import CostModel, MeasuredCost
from .cost_table import CostTable, ReplayCost

ROW_TILE = 8
# Up to this many rows a curve shows the steps of the row tile; above, a tile is lost in the whole.
_STAIRS = 64
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CONTEXTS = (128, 1024, 8192)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds by token rows, linear between the points, level before the first and on with the last slope behind the
    last, and pair_s seconds for each pair of a new token and a token that it sees."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    pair_s: float = 0.0


def num_pairs(sequences: int, tokens: int, context: int) -> float:
    """Pairs of a new token and a token that it sees: `tokens` in all, `context` of each sequence after the step."""
    each = tokens / sequences
    return sequences * (each * context - each * (each - 1) / 2)


@dataclass(frozen=True, slots=True)
class AssumedCost:
    """Costs of a machine of which nothing is known: so many tokens of prompts a second, so long a decode step."""

    tokens_per_s: float = 20_000.0
    decode_step_s: float = 0.02
    unit: str = "s"

    def cost(self, phase: str, batch: npt.NDArray[np.int64], seq: npt.NDArray[np.int64]) -> Floats:
        size = np.asarray(batch * seq.astype(np.float64), np.float64)
        return np.full_like(size, self.decode_step_s) if phase == "decode" else size / self.tokens_per_s


@dataclass(frozen=True, slots=True)
class LoadCost:
    """The law, fitted: rows ascending [R], seconds [R] that never fall, pair_s by phase."""

    rows: Floats
    seconds: Floats
    pair_s: Mapping[str, float]

    @classmethod
    def fit(cls, costs: Iterable[ReplayCost], tile: int = 1) -> LoadCost:
        """The law that full and partial loads follow; tile: of rows, in buckets of so many rows or more.

        Loads of equal rows and different context tell the time of a pair; a phase without such takes that of another.
        Raises BucketError without costs.
        """
        loads = list(costs)
        if not loads:
            raise BucketError("the cost table is empty: measure at least one bucket of each phase")
        rows = np.array([computed_rows(c.tokens, c.bucket.max_tokens, tile) for c in loads], np.float64)
        pairs = np.array([num_pairs(c.sequences, c.tokens, c.context) for c in loads])
        seconds = np.array([c.seconds for c in loads], np.float64)
        phases = np.array([c.bucket.phase for c in loads])
        slopes = {str(phase): _slope(rows, pairs, seconds, phases == phase) for phase in np.unique(phases)}
        known = [slope for slope in slopes.values() if slope is not None]
        pair_s = {phase: min(known, default=0.0) if slope is None else slope for phase, slope in slopes.items()}
        # A pair may not take more than a load with many of them took.
        for phase in pair_s:
            mine = (phases == phase) & (pairs > 0)
            pair_s[phase] = min(pair_s[phase], float(np.min(seconds[mine] / pairs[mine])))
        rest = seconds - np.array([pair_s[str(phase)] for phase in phases]) * pairs
        knots = np.unique(rows)
        level = np.array([float(np.median(rest[rows == knot])) for knot in knots])
        return cls(knots, np.maximum.accumulate(np.maximum(level, 1e-9)), pair_s)

    def at(self, rows: npt.ArrayLike) -> Floats:
        """Seconds of so many rows that see nothing; behind the last point the last slope goes on."""
        wanted = np.asarray(rows, np.float64)
        slope = 0.0
        if len(self.rows) > 1:
            slope = float((self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2]))
        beyond = np.maximum(wanted - self.rows[-1], 0) * slope
        return np.asarray(np.interp(wanted, self.rows, self.seconds) + beyond, np.float64)

    def of_pair(self, phase: str) -> float:
        """Seconds of a pair; of a phase that was not measured, as in prefill."""
        return self.pair_s.get(phase, self.pair_s.get("prefill", min(self.pair_s.values())))


def computed_rows(tokens: int, max_tokens: int, tile: int) -> int:
    """Rows that a graph of max_tokens rows computes for so many tokens where padding is skipped."""
    mine = 1
    while mine < min(max_tokens, tile):
        mine *= 2
    return -(-tokens // mine) * mine


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Costs of any bucket. step_s, token_s: seconds beside the replay of a step, and for each token it samples.

    laws: by phase. computed: seconds of a full bucket where padding is computed, None where it is skipped. source: for
    people.
    """

    laws: Mapping[str, LoadCost]
    computed: CostModel | None
    step_s: float
    token_s: float
    source: str

    @classmethod
    def of_table(cls, table: CostTable, source: str) -> StepCosts:
        """Measured costs. Raises BucketError for a table without costs."""
        if table.padding == "skipped":
            # Such graphs run the same kernels in all phases: together their loads cover more rows.
            laws = dict.fromkeys(PHASES, LoadCost.fit(table.costs, ROW_TILE))
            return cls(laws, None, table.step_s, table.token_s, source)
        return cls(_by_phase(table.costs), MeasuredCost(table.full()), table.step_s, table.token_s, source)

    @classmethod
    def of_model(cls, model: CostModel, source: str) -> StepCosts:
        """Costs by a rule, of buckets whose padding is computed."""
        costs = []
        for phase, batches, seqs in (("prefill", (1,), _ROWS), ("decode", _SEQUENCES, _CONTEXTS)):
            grid = model.cost(phase, np.array(batches)[:, None], np.array(seqs)[None, :])
            for i, batch in enumerate(batches):
                for j, seq in enumerate(seqs):
                    bucket = Bucket(phase, batch, seq)
                    costs.append(ReplayCost(bucket, batch, bucket.max_tokens, seq, float(grid[i, j])))
        return cls(_by_phase(costs), model, 0.0, 0.0, source)

    def seconds(self, bucket: Bucket) -> float:
        """Of a replay of the full bucket."""
        if self.computed is not None:
            phase, batch, seq = bucket.phase, bucket.batch, bucket.seq
            if phase == "mixed":
                phase, batch = "prefill", 1
            return float(self.computed.cost(phase, np.array([batch]), np.array([seq]))[0])
        law, each = self._law(bucket.phase), 1 if bucket.phase == "decode" else bucket.seq
        sequences = 1 if bucket.phase == "mixed" else bucket.batch
        return float(law.at(bucket.max_tokens)) + law.of_pair(bucket.phase) * num_pairs(
            sequences, sequences * each, bucket.seq
        )

    def curves(self, bucket: Bucket, row_tile: int = ROW_TILE) -> tuple[CostCurve, CostCurve]:
        """(what a replay of the bucket takes, what one made for exactly its load would take)."""
        law = self._law(bucket.phase)
        pair_s, top = law.of_pair(bucket.phase), bucket.max_tokens
        knots = sorted({1, top, *(int(row) for row in law.rows if 1 < row < top)})
        exact = CostCurve(tuple(knots), tuple(law.at(knots).tolist()), pair_s)
        if self.computed is not None:
            return CostCurve((top,), (self.seconds(bucket),)), exact
        rows: dict[int, float] = {}
        tile = computed_rows(1, top, row_tile)
        for stair in range(tile, min(top, _STAIRS) + tile, tile):
            rows[stair - tile + 1] = rows[stair] = float(law.at(stair))
        for knot in knots:
            if knot > max(rows):
                rows[knot] = float(law.at(knot + (tile - 1) / 2))
        return CostCurve(tuple(rows), tuple(rows.values()), pair_s), exact

    def _law(self, phase: str) -> LoadCost:
        law = self.laws.get(phase, self.laws.get("prefill"))
        if law is None:
            raise BucketError(f"the cost table has no {phase} bucket: measure at least one")
        return law


def _by_phase(costs: Iterable[ReplayCost]) -> dict[str, LoadCost]:
    loads = list(costs)
    return {
        phase: LoadCost.fit(c for c in loads if c.bucket.phase == phase) for phase in {c.bucket.phase for c in loads}
    }


def _slope(rows: Floats, pairs: Floats, seconds: Floats, mine: npt.NDArray[np.bool_]) -> float | None:
    """Seconds a pair from loads of equal rows and different pairs; None when there are none, never below 0."""
    above = below = 0.0
    for row in np.unique(rows[mine]):
        same = mine & (rows == row)
        # Relative to what such loads take: large loads would drown the others.
        scale = float(np.mean(seconds[same]))
        x = (pairs[same] - np.mean(pairs[same])) / scale
        y = (seconds[same] - np.mean(seconds[same])) / scale
        above += float(x @ y)
        below += float(x @ x)
    return max(above / below, 0.0) if below > 0 else None
