"""Turns demand into an optimization problem on a grid of candidate sizes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .bucket import Bucket, whole_blocks
from .cost import CostModel, TotalCost
from .demand import Demand, ServerModel
from .exact import solve as solve_axis
from .grid import Cell, GridProblem
from .scoring import Outcome, Scorer

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_FULL_CELLS = 1 << 16
_SEARCH_BATCHES, SEARCH_CELLS, _BOUND_CELLS = 16, 1 << 12, 1 << 10


@dataclass(frozen=True)
class PhaseProblem:
    """One phase on all candidate sizes: the multiples of the block size that steps round up to, and the top.

    batches [B], seqs [S] ascending; weight, cost, rank, base, base_rank [B, S] and load [B, B] as in GridProblem. Costs
    exclude the part that is equal in every bucket. The base bucket is always part of the ladder. scorer: scores ladders
    of any sizes by true lengths.

    Here a prefill bucket holds `batch` prompts of `seq` tokens. The scheduler also packs other prompts with the same
    total, at no higher cost.
    """

    demand: Demand
    batches: Ints
    seqs: Ints
    weight: Floats
    cost: Floats
    load: Floats
    rank: Ints
    base: Floats
    base_rank: Ints
    base_bucket: tuple[int, int]
    scorer: Scorer
    model: CostModel
    server: ServerModel
    block_size: int

    @classmethod
    def of(cls, demand: Demand, server: ServerModel, model: CostModel, block_size: int) -> PhaseProblem:
        """Rounds lengths up to the block size. With two dimensions, to a multiple of it (2, 4, …) that keeps the grid
        within 65,536 cells."""
        decode = demand.phase == "decode"
        top = top_of(demand, server, block_size)
        priced = TotalCost(model) if demand.total else model
        batches = np.unique(np.append(demand.batch, server.max_num_seqs if decode else 1))
        unit = block_size
        while True:
            rounded = np.minimum(-(-demand.seq // unit) * unit, top)
            seqs = np.unique(np.append(rounded, top))
            if len(batches) == 1 or len(batches) * len(seqs) <= _FULL_CELLS:
                break
            unit *= 2
        weight = np.zeros((len(batches), len(seqs)))
        np.add.at(weight, (np.searchsorted(batches, demand.batch), np.searchsorted(seqs, rounded)), demand.weight)
        # A decode graph reads whole blocks, the last one included.
        whole = whole_blocks(seqs, block_size) if decode else seqs
        phase, rows, columns = demand.phase, batches[:, None], whole[None, :]
        cost, load = priced.cost(phase, rows, columns).astype(np.float64), priced.load(phase, rows, batches[None, :])
        steps = priced.step(phase, rows, columns)
        area = rows * columns.astype(np.float64)
        # The scheduler's bucket order, as in `bucket.rank`: token rows first.
        shape = cost.shape
        keys = (rows, columns, rows) if decode else (rows, 0 * columns, rows * columns)
        order = np.lexsort([np.broadcast_to(key, shape).ravel() for key in keys])
        rank = np.empty(shape, np.int64)
        rank.flat[order] = np.arange(cost.size)
        max_area = 0
        if demand.total:
            # A block table has a block per sequence.
            cost[np.broadcast_to(columns < rows * block_size, shape)] = np.inf
        if decode:
            base = np.broadcast_to(cost[-1, -1] + load[-1][:, None], shape).copy()
            base_rank = np.full(shape, rank[-1, -1])
        else:
            # Sequences that no bucket holds together run one after another.
            base = np.maximum(rows * (cost[0, -1] + load[0, 0] + steps[0]) - steps, 0.0)
            base_rank = np.full(shape, cost.size)
            base_rank[batches == 1] = rank[0, -1]
            max_area = max(server.max_prefill_tokens or server.max_model_len, top)
            cost[area > max_area] = np.inf
        base_bucket = (int(batches[-1] if decode else 1), int(top))
        scorer = Scorer.of(demand, Bucket(phase, *base_bucket, demand.total), max_area, priced, block_size)
        return cls(
            demand, batches, seqs, weight, cost, load, rank, base, base_rank, base_bucket,
            scorer, model, server, block_size,
        )  # fmt: skip

    def with_cost(self, model: CostModel) -> PhaseProblem:
        """The same demand and sizes, with the costs of another model."""
        return PhaseProblem.of(self.demand, self.server, model, self.block_size)

    @cached_property
    def full(self) -> GridProblem:
        """The problem on all candidates."""
        return GridProblem(
            self.weight, self.cost, self.load, self.rank, self.cost, self.load, self.base, self.base_rank
        )

    def for_search(self, cells: int = SEARCH_CELLS) -> tuple[GridProblem, Ints, Ints]:
        """The problem on at most 16 batches and `cells` cells, with the indices of its batches and seqs among all."""
        rows = _thin(self.batches, self.weight.sum(axis=1), _SEARCH_BATCHES)
        return self._restricted(rows, cells)

    @cached_property
    def for_bound(self) -> GridProblem:
        """The problem on at most 1,024 cells; its lower bounds hold for all candidates because of `floor`."""
        rows = _thin(self.batches, self.weight.sum(axis=1), _SEARCH_BATCHES)
        return self._restricted(rows, _BOUND_CELLS)[0]

    def cells_of(self, buckets: list[tuple[int, int]]) -> tuple[Cell, ...]:
        """The largest cells within the buckets, without the base bucket and forbidden cells.

        If bucket sizes are candidates, or contexts of equally many blocks, the cells hold the same steps.
        """
        cells = []
        for batch, seq in buckets:
            i = int(np.searchsorted(self.batches, batch, side="right")) - 1
            held = whole_blocks(seq, self.block_size) if self.demand.phase == "decode" else seq
            j = int(np.searchsorted(self.seqs, held, side="right")) - 1
            if i >= 0 and j >= 0 and np.isfinite(self.cost[i, j]) and (batch, seq) != self.base_bucket:
                cells.append((i, j))
        return tuple(dict.fromkeys(cells))

    def buckets_of(self, cells: tuple[Cell, ...]) -> list[tuple[int, int]]:
        """Sorted (batch, seq) of the cells and the base bucket."""
        return sorted({(int(self.batches[i]), int(self.seqs[j])) for i, j in cells} | {self.base_bucket})

    def shrink(self, cells: tuple[Cell, ...]) -> tuple[Cell, ...]:
        """Moves every cell down to the demand it serves and drops idle ones; returns `cells` if that is cheaper."""
        owner = self.full.owners(cells)
        shrunk = []
        for n in range(len(cells)):
            rows, columns = np.nonzero((owner == n) & (self.weight > 0))
            if len(rows):
                shrunk.append((int(rows.max()), int(columns.max())))
        result = tuple(dict.fromkeys(shrunk))
        return result if self.full.total(result) <= self.full.total(cells) else cells

    def evaluate(self, buckets: list[tuple[int, int]]) -> Outcome:
        """The outcome of all demand with these buckets, of any sizes, and the base bucket, by true lengths and the
        scheduler's choice."""
        return self.scorer.outcome(buckets)

    def may_open(self, batch: int, seq: int) -> bool:
        """Whether a bucket stays within the token limit of one step."""
        return self.scorer.may_open(batch, seq)

    def _restricted(self, rows: Ints, max_cells: int) -> tuple[GridProblem, Ints, Ints]:
        columns = _thin(self.seqs, self.weight.sum(axis=0), max(1, max_cells // len(rows)))
        # Demand rounds up to the next kept size: cells between two kept ones fold into the upper one.
        row_starts, column_starts = np.append(0, rows[:-1] + 1), np.append(0, columns[:-1] + 1)

        def folded(operation: np.ufunc, values: Floats | Ints) -> Floats:
            by_rows = operation.reduceat(values, row_starts, axis=0)
            return np.asarray(operation.reduceat(by_rows, column_starts, axis=1), np.float64)

        batches = np.arange(len(self.batches))
        load = np.where(batches[:, None] >= batches[None, :], self.load, np.inf)
        least_load = np.minimum.reduceat(np.minimum.reduceat(load, row_starts, axis=0), row_starts, axis=1)
        problem = GridProblem(
            weight=folded(np.add, self.weight),
            cost=self.cost[np.ix_(rows, columns)],
            load=self.load[np.ix_(rows, rows)],
            rank=self.rank[np.ix_(rows, columns)],
            floor=folded(np.minimum, self.cost),
            floor_load=least_load,
            # Take the least of the folded floors, so that a bound stays valid; only prefill of many batches differs.
            base=folded(np.minimum, self.base),
            base_rank=folded(np.maximum, self.base_rank).astype(np.int64),
        )
        return problem, rows, columns


def top_of(demand: Demand, server: ServerModel, block_size: int) -> int:
    """The length of the largest bucket, which holds everything that the server admits."""
    if demand.total:
        return server.max_num_seqs * whole_blocks(server.max_model_len, block_size)
    return server.max_model_len if demand.phase == "decode" else server.max_chunk


def _thin(sizes: Ints, weight: Floats, count: int) -> Ints:
    """Indices of at most `count` sizes, the last included, that pad the demand least."""
    if len(sizes) <= count:
        return np.arange(len(sizes))
    return np.array(solve_axis(sizes.astype(np.float64), weight, count).ladder(count))
