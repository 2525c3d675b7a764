"""LoRA adapters of a linear layer, and the separate activation of a layer with adapters.

`adapter_shrink`: a group computes one number; each item takes every 64th column, and one tree adds the sums.
Tensor cores compute it otherwise (`tensor_adapters.py`).
`adapter_expand`: an item computes a column for all rows of a tile, each as a chain over ascending ranks. There are few
products for each number that is read and written, so tensor cores would gain nothing.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.gpu.kernels.fma import fma
from llmc.compiler.targets.gpu.kernels.fold import Fold, add
from llmc.compiler.targets.gpu.kernels.groups import calling
from llmc.compiler.targets.gpu.launch import ITEMS
from llmc.compiler.targets.reference.kernels.adapters import Pool, Slot, shrink_buffers
from llmc.compiler.targets.reference.kernels.frame import Cell, Expr, Frame, let, when


def _chosen(number: Expr, starts: list[int], values: list[Expr]) -> Expr:
    """The entry of `values` for the last of `starts` not above `number`."""
    found = values[0]
    for start, value in zip(starts[1:], values[1:], strict=True):
        found = T.Select(number >= start, value, found)
    return found


class _Place:
    """A row of a tile, and its adapter's slot. number: of the row, counted over all tiles at `count` rows each."""

    def __init__(self, k: Frame, pool: Pool, number: Expr) -> None:
        at = let(T.truncdiv(number, pool.tile_rows) * (2 + pool.tile_rows) + 1)
        of_tile = let(T.truncmod(number, pool.tile_rows))
        self.slot = Slot(k, pool, let(k.raw("tiles", at)))
        # A tile that is not full repeats its last row.
        self.row = let(k.raw("tiles", at + 2 + of_tile))
        self.used = let(T.Cast("int32", of_tile < k.raw("tiles", at + 1)))


def adapter_shrink(spec: KernelSpec) -> tirx.PrimFunc:
    pool = Pool(spec)
    of_layer = pool.width // pool.num_layers
    with Frame(spec.symbol(), shrink_buffers(pool)) as k:
        item, fold = calling(k).item, Fold(k, add)
        count = let(k.raw("tiles", T.int32(0)) * (pool.tile_rows * pool.width))
        with calling(k).share_groups(count) as unit:
            place, number = _Place(k, pool, let(T.truncdiv(unit, pool.width))), let(T.truncmod(unit, pool.width))
            r, head = let(T.truncmod(number, of_layer)), let(T.truncdiv(number, of_layer)) if pool.heads else 0
            parts = range(len(pool.rows))
            starts = [part * of_layer for part in parts]
            rank = let(_chosen(number, starts, [place.slot.rank(part) for part in parts]))
            scale = let(_chosen(number, starts, [place.slot.scale(part) for part in parts]), "float32")
            first = let(_chosen(number, starts, [place.slot.a(part, head) for part in parts]) + r * pool.stride)
            source = let((place.row * max(1, pool.heads) + head) * pool.x_stride)
            wanted = let(T.Cast("int32", T.And(place.used == 1, r < rank)))
            total = Cell(T.float32(0.0))
            # No branch around the tree, because every item must reach it: an unused item has no columns.
            turns = let(T.truncdiv(pool.columns - item + (ITEMS - 1), ITEMS) * wanted)
            with T.serial(turns) as turn:
                i = let(turn * ITEMS + item)
                total.set(fma(k.load("x", source + i), k.load("pool", first + i), total.get()))
            found = let(fold(total.get()) * scale, "float32")
            with when(T.And(item == 0, wanted == 1)):
                k.store("out", found, place.row * pool.width + number)
    return k.function()


def adapter_expand(spec: KernelSpec) -> tirx.PrimFunc:
    pool = Pool(spec)
    n, parts = max(1, pool.heads) * sum(pool.rows), len(pool.rows)
    of_layer, starts = pool.width // pool.num_layers, [sum(pool.rows[:part]) for part in range(parts)]
    buffers = {"x": "f32", "tiles": "i32", "pool": pool.dtype, "out": "f32"}
    with Frame(spec.symbol(), buffers) as k, k.share(let(k.raw("tiles", T.int32(0)) * n)) as unit:
        at, column = let(T.truncdiv(unit, n) * (2 + pool.tile_rows) + 1), let(T.truncmod(unit, n))
        slot, count = Slot(k, pool, let(k.raw("tiles", at))), let(k.raw("tiles", at + 1))
        rank = let(_chosen(column, starts, [slot.rank(part) for part in range(parts)]))
        if pool.heads:
            head, within = let(T.truncdiv(column, pool.rows[0])), let(T.truncmod(column, pool.rows[0]))
            first, begin = let(slot.b(0, head) + within * rank), let(head * of_layer)
        else:
            within = let(column - _chosen(column, starts, [T.int32(start) for start in starts]))
            first = let(_chosen(column, starts, [slot.b(part) for part in range(parts)]) + within * rank)
            begin = let(_chosen(column, starts, [T.int32(part * of_layer) for part in range(parts)]))

        def expand(num_rows: int) -> None:
            """Adds to all rows of the tile what it reads of B once."""
            # A tile that is not full repeats its last row.
            rows = [let(k.raw("tiles", at + 2 + i)) for i in range(num_rows)]
            sources = [let(row * pool.width + begin) for row in rows]
            totals = [Cell(T.float32(0.0)) for _ in rows]
            with T.serial(rank) as r:
                b = let(k.load("pool", first + r), "float32")
                for total, source in zip(totals, sources, strict=True):
                    total.set(fma(k.raw("x", source + r), b, total.get()))
            for i, (row, total) in enumerate(zip(rows, totals, strict=True)):
                with when(i < count):
                    k.store("out", k.raw("out", row * n + column) + total.get(), row * n + column)

        with when(T.And(rank > 0, count > 0)), T.If(count == 1):
            with T.Then():
                expand(1)
            with T.Else():
                expand(pool.tile_rows)
    return k.function()
