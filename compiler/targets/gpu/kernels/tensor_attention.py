"""Attention on tensor cores, plain and latent: four warps compute heads of neighbouring tokens that share keys.

Units, and what becomes of their partitions, are as in `attend.py`; the arithmetic is that of `tensor_partition.py`.
Each number of a key or a value is read by one lane of a unit, straight into the operand of its product.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.gpu.attention_split import PARTITION, partial_floats
from llmc.compiler.targets.gpu.kernels.groups import Shared, calling, sync, unrolled
from llmc.compiler.targets.gpu.kernels.latent_attention import Latent
from llmc.compiler.targets.gpu.kernels.query_tiles import Lane, QueryTiles
from llmc.compiler.targets.gpu.kernels.rotated_tiles import RotatedTiles
from llmc.compiler.targets.gpu.kernels.runs import Run
from llmc.compiler.targets.gpu.kernels.softmax import LEAST, folded, joined, later_maximum, scaled
from llmc.compiler.targets.gpu.kernels.tensor_partition import Attended, TensorPartition
from llmc.compiler.targets.gpu.kernels.turned import rotated_buffers
from llmc.compiler.targets.gpu.tensor_attention import WARPS, TensorAttention
from llmc.compiler.targets.reference.kernels.attention import Attention, seen_keys
from llmc.compiler.targets.reference.kernels.frame import (
    BLOCK_TABLE_STRIDE,
    NUM_TOKENS,
    Array,
    Expr,
    Frame,
    let,
    when,
)


class _Unit:
    """A unit of work: heads of a run of tokens."""

    def __init__(self, k: Frame, spec: KernelSpec, of: TensorAttention, attention: Attended) -> None:
        p = {"window": 0, **spec.as_dict()}
        self._k, self._of, self._a = k, of, attention
        self.run = Run(k, of.tokens, lambda token: seen_keys(k, p, token))
        self.lane = Lane(k)
        rotates = spec.op == "rotated_attention"
        self.rows = (
            RotatedTiles(k, spec, of, self.run, self.lane) if rotates else QueryTiles(k, of, self.run, self.lane)
        )
        self.partition = TensorPartition(k, of, attention, float(p["scale"]), self.run, self.rows, self.lane)

    def begin(self, tile: Expr, offset: Expr, part: Expr, stride: Expr) -> None:
        of = self._of
        self.run.begin(tile, offset)
        kv_head = let(T.truncdiv(part, of.splits))
        within = let(T.truncmod(part, of.splits) * of.heads)
        head = let(kv_head * of.group + within)
        self._a.begin(self._k, self.run.token, head, stride)
        self.rows.begin(head, let(of.group - within))

    def sees(self, row: Expr, start: Expr) -> Expr:
        """Whether a row sees keys of a partition."""
        token = self.rows.token(row)
        return T.And(self.rows.exists(row), self.run.sees(token, start, let(start + (PARTITION - 1))))

    def each_sum(self, tile: Expr, odd: Expr, body: Callable[[Expr, Expr], None]) -> None:
        """Calls body(element, number of the sum) for the sums of one of this lane's columns."""
        of, partition = self._of, self.partition
        with unrolled(partition.parts) as part, unrolled(2) as half:
            i = let((tile * partition.parts + part) * 4 + half * 2 + odd)
            if of.pieces % WARPS == 0:
                body(partition.element(part, half), i)
                return
            with when(partition.piece(T.truncdiv(part, of.piece)) < of.pieces):
                body(partition.element(part, half), i)


class _Result:
    """What partitions in order are folded into."""

    def __init__(self, k: Frame, unit: _Unit) -> None:
        self._k, self._unit, rows = k, unit, unit.rows.rows
        self._top, self._total, self._keep, self._gain = (Shared(rows) for _ in range(4))
        self._size = unit.rows.count * unit.partition.parts * 4
        self._sums = Array(self._size)

    def _begin(self) -> None:
        with unrolled(self._size) as i:
            self._sums[i] = T.float32(0.0)
        with when(self._unit.lane.item < self._unit.rows.rows):
            self._top[self._unit.lane.item] = T.float32(LEAST)
            self._total[self._unit.lane.item] = T.float32(0.0)

    def compute(self, start: Expr, end: Expr) -> None:
        """Computes and folds partitions. end: behind the last one."""
        self._begin()
        with T.serial(start, end) as number:
            first = let(number * PARTITION)
            self._unit.partition.compute(first, lambda: self._find_factors(first))
            self._fold(first)

    def _find_factors(self, start: Expr) -> None:
        """Of the partition computed last; item r does the sums of row r."""
        unit, of = self._unit, self._unit.partition
        row = unit.lane.item
        with when(row < unit.rows.rows), when(unit.sees(row, start)):
            before, most = let(self._top[row], "float32"), of.most(row)
            top = later_maximum(before, most)
            keep, gain = scaled(before, top), scaled(most, top)
            self._total[row] = folded(self._total[row], keep, of.total(row), gain)
            self._top[row], self._keep[row], self._gain[row] = top, keep, gain

    def _fold(self, start: Expr) -> None:
        """A partition without keys leaves a result as it is, also the sign of a zero."""
        unit, later = self._unit, self._unit.partition.sums
        sync()
        with unit.rows.each() as tile, unrolled(2) as odd:
            row = unit.rows.column(tile, odd)
            with when(unit.sees(row, start)):
                keep, gain = (let(shared[row], "float32") for shared in (self._keep, self._gain))
                with unrolled(unit.partition.parts * 2) as sum_of_column:
                    i = let(tile * (unit.partition.parts * 4) + sum_of_column * 2 + odd)
                    self._sums[i] = folded(self._sums[i], keep, later[i], gain)

    def finish(self, attention: Attended) -> None:
        """Writes the values."""
        unit, k, row = self._unit, self._k, self._unit.lane.item
        if attention.sinks:
            sync()  # all items have read the factors of the last partition
            with when(row < unit.rows.rows):
                before, one = let(self._top[row], "float32"), let(k.raw("sinks", unit.rows.head(row)), "float32")
                top = later_maximum(before, one)
                self._keep[row] = scaled(before, top)
                self._total[row] = joined(self._total[row], self._keep[row], scaled(one, top))
        sync()
        with unit.rows.each() as tile, unrolled(2) as odd:
            column = unit.rows.column(tile, odd)
            with when(unit.rows.exists(column)):
                self._write(attention, tile, odd, column)

    def _write(self, attention: Attended, tile: Expr, odd: Expr, row: Expr) -> None:
        unit = self._unit
        token, head = let(unit.run.token + unit.rows.token(row)), unit.rows.head(row)
        total = let(self._total[row], "float32")
        keep = let(self._keep[row], "float32") if attention.sinks else None

        def write(element: Expr, i: Expr) -> None:
            value = self._sums[i] if keep is None else let(self._sums[i] * keep, "float32")
            attention.write(token, head, element, value / total)

        unit.each_sum(tile, odd, write)


def _store(k: Frame, unit: _Unit, of: TensorAttention, number: Expr, segments: int) -> None:
    """Writes a partition's results to `partials`."""
    partition, rows, floats = unit.partition, unit.rows, partial_floats(of.width)

    def record(row: Expr) -> Expr:
        token = let(unit.run.token + rows.token(row))
        return let(((token * (of.kv_heads * of.group) + rows.head(row)) * segments + number) * floats)

    row = unit.lane.item
    with when(row < rows.rows), when(rows.exists(row)):
        start = record(row)
        k.put_raw("partials", partition.most(row), let(start + of.width))
        k.put_raw("partials", partition.total(row), let(start + (of.width + 1)))
    with rows.each() as tile, unrolled(2) as odd:
        column = rows.column(tile, odd)
        with when(rows.exists(column)):
            begin = record(column)
            unit.each_sum(tile, odd, lambda element, i: k.put_raw("partials", partition.sums[i], let(begin + element)))


def tensor_attention(spec: KernelSpec, of: TensorAttention) -> tirx.PrimFunc:
    """of: what the spec's attention is on tensor cores."""
    a = Latent(spec) if spec.op == "latent_attention" else Attention(spec)
    side, rotates = max(1, a.segments), spec.op == "rotated_attention"
    buffers = rotated_buffers(spec, a) if rotates and isinstance(a, Attention) else a.buffers()
    with Frame(spec.symbol(), buffers) as k:
        num_tokens, stride = k.scalar(NUM_TOKENS), k.scalar(BLOCK_TABLE_STRIDE)
        unit = _Unit(k, spec, of, a)
        result = None if a.segments else _Result(k, unit)
        tiles = let(T.truncdiv(num_tokens + (of.tokens - 1), of.tokens))
        units = let(tiles * of.units)
        with calling(k).share_groups(let(units * (side * of.tokens))) as number:
            # As in `attend`, units that seldom have work come later.
            slot, rest = let(T.truncdiv(number, units)), let(T.truncmod(number, units))
            offset, own = let(T.truncdiv(slot, side)), let(T.truncmod(slot, side))
            # Later tokens see more keys, so they begin first.
            unit.begin(let(tiles - 1 - T.truncdiv(rest, of.units)), offset, let(T.truncmod(rest, of.units)), stride)
            start, end = unit.run.partitions()
            if a.segments:
                start, end = let(T.max(start, own)), let(T.min(end, own + 1))
            with when(start < end):
                sync()
                unit.rows.write_own(start, end)
                unit.rows.load()
                if result is None:
                    with T.serial(start, end) as segment:
                        unit.partition.compute(let(segment * PARTITION))
                        _store(k, unit, of, segment, a.segments)
                else:
                    result.compute(start, end)
                    result.finish(a)
    return k.function()
