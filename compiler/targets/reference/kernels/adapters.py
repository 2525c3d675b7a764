"""LoRA adapters of a linear layer, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.adapter_slot import padded
from llmc.compiler.dtypes import FLOATS
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.reference.kernels.frame import Cell, Expr, Frame, let, row_width, when


class Pool:
    """Sizes and offsets of a pool, in units of `dtype`. columns, rows: of one expert or head where there are `experts`
    or `heads`. num_layers: number of pairs of an A and a B: of parts, or of heads."""

    def __init__(self, spec: KernelSpec) -> None:
        p = spec.as_dict()

        def numbers(name: str) -> list[int]:
            return [int(value) for value in str(p[name]).split()]

        self.dtype, self.columns, self.width = str(p["act_dtype"]), int(p["k"]), int(p["width"])
        self.experts, self.heads, self.own = int(p.get("experts", 0)), int(p.get("heads", 0)), str(p.get("own", ""))
        copies = self.experts or (self.heads if self.own == "a" else 0)
        # Elements between rows of A.
        self.stride = copies * padded(self.columns) if copies else self.columns
        # Of x, whose rows of heads are floats.
        self.x_dtype = "f32" if self.heads else self.dtype
        self.x_stride = int(p.get("stride", 0)) or row_width(self.columns, self.dtype)
        self.rows, self.tile_rows = numbers("parts"), int(p["tile_rows"])
        self.num_layers = self.heads or len(self.rows)
        self.item_bytes = 4 // FLOATS[self.dtype].per_word
        self.slot = int(p["slot_bytes"]) // self.item_bytes
        self.a, self.b = ([at // self.item_bytes for at in numbers(name)] for name in ("a_offsets", "b_offsets"))


class Slot:
    """The slot of a tile's adapter. number: of the slot; of experts, slot · experts + expert."""

    def __init__(self, k: Frame, pool: Pool, number: Expr) -> None:
        self._k, self._pool = k, pool
        self._expert = let(T.truncmod(number, pool.experts)) if pool.experts else None
        self._first = let((T.truncdiv(number, pool.experts) if pool.experts else number) * pool.slot)

    def _word(self, index: int) -> Expr:
        """An int32 of the header; in a pool of 16-bit floats it is read as two halves."""
        if self._pool.item_bytes == 4:
            return T.reinterpret("int32", self._k.raw("pool", self._first + index))
        low, high = (T.Cast("int32", self._k.raw("pool", self._first + 2 * index + half)) for half in range(2))
        return T.bitwise_or(low, T.shift_left(high, T.int32(16)))

    def rank(self, part: int) -> Expr:
        return let(self._word(2 * part))

    def scale(self, part: int) -> Expr:
        return let(T.reinterpret("float32", self._word(2 * part + 1)), "float32")

    def a(self, part: int, head: Expr | int = 0) -> Expr:
        """Offset of A [rank, columns] of a part or of a head, whose rows are `Pool.stride` apart."""
        which = head if self._pool.own == "a" else self._expert
        within = 0 if which is None else which * padded(self._pool.columns)
        return let(self._first + self._pool.a[part] + within)

    def b(self, part: int, head: Expr | int = 0) -> Expr:
        """Offset of B [rows, rank] of a part or of a head."""
        which = head if self._pool.own == "b" else self._expert
        within = 0 if which is None else which * padded(self._pool.rows[part]) * self.rank(part)
        return let(self._first + self._pool.b[part] + within)


@contextmanager
def _rows(k: Frame, pool: Pool) -> Iterator[tuple[Expr, Slot]]:
    """Loops over the rows of this task's tiles, each with its slot."""
    with k.share(let(k.raw("tiles", T.int32(0)))) as tile:
        at = let(tile * (2 + pool.tile_rows) + 1)
        of = Slot(k, pool, let(k.raw("tiles", at)))
        with T.serial(let(k.raw("tiles", at + 1))) as i:
            yield let(k.raw("tiles", at + 2 + i)), of


def _layers(pool: Pool) -> Iterator[tuple[int, Expr | int, Expr | int]]:
    """The part, the head and the number of each layer of a pool; emits a loop over heads."""
    if pool.heads:
        with T.serial(pool.heads) as head:
            yield 0, head, head
        return
    for part in range(len(pool.rows)):
        yield part, 0, part


def shrink_buffers(pool: Pool) -> dict[str, str]:
    """The operands of `adapter_shrink`; here, rows of experts lie as those of tokens do, so no index is read."""
    index = {"index": "i32"} if pool.experts else {}
    return {"x": pool.x_dtype, **index, "tiles": "i32", "pool": pool.dtype, "out": "f32"}


def adapter_shrink(spec: KernelSpec) -> tirx.PrimFunc:
    pool = Pool(spec)
    of_layer = pool.width // pool.num_layers
    with Frame(spec.symbol(), shrink_buffers(pool)) as k, _rows(k, pool) as (row, of):
        for part, head, number in _layers(pool):
            first, scale = of.a(part, head), of.scale(part)
            source = let((row * max(1, pool.heads) + head) * pool.x_stride)
            with T.serial(of.rank(part)) as r:
                total = Cell(T.float32(0.0))
                with T.serial(pool.columns) as i:
                    a = k.load("pool", first + r * pool.stride + i)
                    total.set(total.get() + k.load("x", source + i) * a)
                k.store("out", total.get() * scale, row * pool.width + number * of_layer + r)
    return k.function()


def adapter_pick(spec: KernelSpec) -> tirx.PrimFunc:
    """The column of A of each row's token, times the scale."""
    pool = Pool(spec)
    buffers = {"ids": "i32", "tiles": "i32", "pool": pool.dtype, "out": "f32"}
    with Frame(spec.symbol(), buffers) as k:
        of_tile = pool.tile_rows * pool.width
        with k.share(let(k.raw("tiles", T.int32(0)) * of_tile)) as unit:
            at, within = let(T.truncdiv(unit, of_tile) * (2 + pool.tile_rows) + 1), let(T.truncmod(unit, of_tile))
            i, r = let(T.truncdiv(within, pool.width)), let(T.truncmod(within, pool.width))
            slot = Slot(k, pool, let(k.raw("tiles", at)))
            with when(T.And(i < k.raw("tiles", at + 1), r < slot.rank(0))):
                row = let(k.raw("tiles", at + 2 + i))
                # As in `embedding`, an invalid id takes some column of the matrix.
                token = let(T.max(T.min(k.raw("ids", row), pool.columns - 1), 0))
                a = k.load("pool", slot.a(0) + r * pool.stride + token)
                k.store("out", a * slot.scale(0), row * pool.width + r)
    return k.function()


def adapter_expand(spec: KernelSpec) -> tirx.PrimFunc:
    pool = Pool(spec)
    n, of_layer = max(1, pool.heads) * sum(pool.rows), pool.width // pool.num_layers
    buffers = {"x": "f32", "tiles": "i32", "pool": pool.dtype, "out": "f32"}
    with Frame(spec.symbol(), buffers) as k, _rows(k, pool) as (row, of):
        for part, head, number in _layers(pool):
            first, rank, rows = of.b(part, head), of.rank(part), pool.rows[part]
            source, to = let(row * pool.width + number * of_layer), let(row * n + sum(pool.rows[:part]) + head * rows)
            with when(rank > 0), T.serial(rows) as column:
                total = Cell(T.float32(0.0))
                with T.serial(rank) as r:
                    total.set(total.get() + k.raw("x", source + r) * k.load("pool", first + column * rank + r))
                k.store("out", k.raw("out", to + column) + total.get(), to + column)
    return k.function()


def adapter_pairs(spec: KernelSpec) -> tirx.PrimFunc:
    """A tile of its own for each (token, expert) pair of each row of a tile; it is empty for rows past the last one."""
    p = spec.as_dict()
    size, top_k, experts = int(p["tile_rows"]), int(p["top_k"]), int(p["experts"])
    buffers = {"tiles": "i32", "chosen": "i32", "index": "i32", "out": "i32"}
    with Frame(spec.symbol(), buffers) as k:
        count = let(k.raw("tiles", T.int32(0)) * (size * top_k))
        # Without tiles, their number is still written.
        with k.share(let(T.max(count, 1))) as number:
            with when(number == 0):
                k.put_raw("out", count, T.int32(0))
            with when(number < count):
                source, to = let(T.truncdiv(number, size * top_k) * (2 + size) + 1), let(number * (2 + size) + 1)
                i, j = let(T.truncmod(T.truncdiv(number, top_k), size)), let(T.truncmod(number, top_k))
                row = let(k.raw("tiles", source + 2 + i))
                expert = let(k.raw("chosen", row * (2 * top_k) + j))
                k.put_raw("out", k.raw("tiles", source) * experts + expert, to)
                k.put_raw("out", T.Cast("int32", i < k.raw("tiles", source + 1)), to + 1)
                with T.serial(size) as filled:
                    k.put_raw("out", let(row * top_k + j), to + 2 + filled)
    return k.function()


def adapter_samples(spec: KernelSpec) -> tirx.PrimFunc:
    """Each tile of tokens becomes a tile of those of its rows that are sampled, which may be none."""
    p = spec.as_dict()
    size, most = int(p["tile_rows"]), int(p["samples"])
    buffers = {"tiles": "i32", "index": "i32", "out": "i32"}
    with Frame(spec.symbol(), buffers) as k:
        count, samples = let(k.raw("tiles", T.int32(0))), k.scalar(int(p["rows"]))
        # Without tiles, their number is still written.
        with k.share(let(T.max(count, 1))) as tile:
            with when(tile == 0):
                k.put_raw("out", count, T.int32(0))
            with when(tile < count):
                at, found, last = let(tile * (2 + size) + 1), Cell(T.int32(0), "int32"), Cell(T.int32(0), "int32")
                with T.serial(let(k.raw("tiles", at + 1))) as i:
                    row = let(k.raw("tiles", at + 2 + i))
                    sample = _sample_of(k, row, samples, most)
                    with when(sample < samples), when(k.raw("index", sample) == row):
                        last.set(sample)
                        k.put_raw("out", sample, at + 2 + found.get())
                        found.set(found.get() + 1)
                k.put_raw("out", k.raw("tiles", at), at)
                k.put_raw("out", found.get(), at + 1)
                with T.serial(let(found.get()), size) as i:
                    k.put_raw("out", last.get(), at + 2 + i)
    return k.function()


def _sample_of(k: Frame, row: Expr, samples: Expr, most: int) -> Expr:
    """The last sample whose row is not behind `row`; the first one if all are."""
    place = Cell(T.int32(0), "int32")
    for reach in (1 << i for i in reversed(range(most.bit_length()))):
        further = let(place.get() + reach)
        with when(further < samples), when(k.raw("index", further) <= row):
            place.set(further)
    return let(place.get())
