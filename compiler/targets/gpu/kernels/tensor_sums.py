"""A warp's sums on tensor cores: chains of products along K, scaled into totals, and written with bias and gate."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.gpu.kernels.fma import fma
from llmc.compiler.targets.gpu.kernels.fragments import LANES, call, late, weight_of, x_operand
from llmc.compiler.targets.gpu.kernels.groups import Shared, calling, unrolled
from llmc.compiler.targets.gpu.kernels.row_tiles import Tile
from llmc.compiler.targets.gpu.kernels.short_groups import ShortGroups
from llmc.compiler.targets.gpu.tensor_cores import MATRIX_COLUMNS, MATRIX_ROWS, WARP, TensorLayer
from llmc.compiler.targets.reference.kernels.frame import Array, Expr, Frame, let, row_width, when
from llmc.compiler.targets.reference.kernels.linear import activated, activated_dtype
from llmc.compiler.targets.reference.kernels.matrix import Matrix
from llmc.compiler.targets.reference.kernels.rows_int8 import Int8Rows

HALF = 8
"""Distance between the two weight rows of a lane's results."""


class Layer:
    """The layer, and this item's position in it. columns: of the result, which each part has."""

    def __init__(self, k: Frame, spec: KernelSpec, layer: TensorLayer, matrix: Matrix | None) -> None:
        p = spec.as_dict()
        self.k, self.p, self.layer, self.matrix = k, p, layer, matrix
        self.act, self.parts = activated_dtype(p), layer.parts
        self.columns = layer.rows // layer.parts
        self.int8 = Int8Rows(layer.width, matrix.scales) if matrix is not None and layer.dtype == "i8" else None
        self.weight = weight_of(layer, matrix)
        self.x = x_operand(layer, 0 if matrix is None else matrix.scales)
        self.held: tuple[Shared, int] | None = None
        """Where the group's only row of x lies in shared memory, in words, if the layer norms it."""
        item = calling(k).item
        self.warp, within = let(T.truncdiv(item, WARP)), let(T.truncmod(item, WARP))
        self.of_row, self.lane = let(T.truncdiv(within, LANES)), let(T.truncmod(within, LANES))

    def int8_word(self, row: Expr, word: Expr) -> Expr:
        """A word of an int8 row of x."""
        if self.held is not None:
            memory, begin = self.held
            return T.Cast("int32", memory[let(begin + word)])
        assert self.int8 is not None
        return self.k.raw("x", row * self.int8.words + word)

    def zero(self, row: Expr, step: Expr) -> Expr:
        """The zero point that a step of a weight row needs before it is multiplied."""
        if not self.weight.zeros:
            return T.int32(0)
        assert self.matrix is not None
        return let(T.Cast("int32", self.matrix.of_group(self.k, "zero", row, let(step * self.layer.step))))


class Sums:
    """`fragments` of 16 weight rows by `tiles` of 8 rows of x. With a gate, fragments of gate and up take turns."""

    def __init__(self, of: Layer, fragments: int, tiles: int) -> None:
        self._of, self.fragments, self.tiles = of, fragments, tiles
        layer, size = of.layer, fragments * tiles * 4
        self._kind = "int32" if layer.dtype == "i8" else "float32"
        self._chain = Array(size, self._kind)
        self._total = Array(size) if layer.length else self._chain
        self.short = ShortGroups(layer, 2 * fragments) if layer.short else None
        """By what short groups of the step that is multiplied next are scaled."""

    def begin(self, tile: Tile, first_column: Expr, first_place: Expr) -> None:
        """Both of the warp: its first column of the result, and its first place in the tile."""
        self._tile, self._first_column, self._first_place = tile, first_column, first_place
        if self.short is None:
            self._locate()
        with T.unroll(self.fragments * self.tiles * 4) as i:
            self._chain[i] = T.Cast(self._kind, T.int32(0))
            if self._total is not self._chain:
                self._total[i] = T.float32(0.0)

    def _locate(self) -> None:
        """Finds rows and columns of this lane's results: with short groups, which need all registers, at the end."""
        of = self._of
        self._columns: list[list[Expr]] = []
        self.rows: list[list[Expr]] = []
        """By fragment and half, the weight row of this lane's results."""
        for fragment in range(self.fragments):
            block, part = divmod(fragment, of.parts)
            first = self._first_column + (block * MATRIX_ROWS)
            columns = [let(first + half * HALF + of.of_row) for half in range(2)]
            self._columns.append(columns)
            base = let(self._tile.base + part * of.columns)
            self.rows.append([let(T.min(column, of.columns - 1) + base) for column in columns])

    def _own_place(self) -> Expr:
        """The place in the tile of this lane's first result."""
        return let(self._first_place + self._of.lane * 2)

    def _place(self, own: Expr, tile: Expr, odd: Expr) -> Expr:
        """The place in the tile of a result of this lane."""
        return let(own + tile * MATRIX_COLUMNS + odd)

    def multiply(self, step: Expr, stored: list[list[Array]], x: Callable[[Expr], Array]) -> None:
        """Multiplies a step. stored: a lane's part of each weight row. x: of the x row of a tile."""
        of = self._of
        if self.short is not None:
            fragments = [(of.weight.words(low, T.int32(0)), of.weight.words(high, T.int32(0))) for low, high in stored]
            with unrolled(self.tiles) as tile:
                places = [(fragment * self.tiles + tile) * 4 for fragment in range(self.fragments)]
                self.short.add(fragments, x(tile), self._chain, places)
            return
        words = [
            [of.weight.words(part, of.zero(row, step)) for row, part in zip(rows, parts, strict=True)]
            for rows, parts in zip(self.rows, stored, strict=True)
        ]
        with unrolled(self.tiles) as tile:
            b = x(tile)
            for fragment, (low, high) in enumerate(words):
                c = self._chain.address((fragment * self.tiles + tile) * 4)
                for half in (0, 2):
                    a = (low[half], high[half], low[half + 1], high[half + 1])
                    call(f"llmc_mma_{of.layer.dtype}", c, *a, b[half], b[half + 1])

    def end_step(self, step: Expr) -> None:
        layer = self._of.layer
        if layer.grouped:
            steps = layer.length // layer.step
            with when(T.truncmod(step + 1, steps) == 0):
                self._fold(let(T.truncdiv(step, steps)))

    def end(self) -> None:
        layer = self._of.layer
        if layer.length and (layer.length == layer.width or layer.width % layer.length):
            assert self._of.matrix is not None
            self._fold(T.int32(self._of.matrix.scales - 1))

    def _fold(self, group: Expr) -> None:
        of, k, matrix = self._of, self._of.k, self._of.matrix
        if of.layer.short:
            with T.unroll(self.fragments * self.tiles * 4) as i:
                self._total[i] = self._total[i] + self._chain[i]
                self._chain[i] = T.float32(0.0)
            return
        assert matrix is not None
        scales = [[let(matrix.scale(k, row, group), "float32") for row in rows] for rows in self.rows]
        at_group = let(group * of.layer.length)
        zeros = [
            [let(T.Cast("int32", matrix.of_group(k, "zero", row, at_group))) for row in rows]
            if of.layer.asymmetric and of.int8 is not None
            else [T.int32(1)] * 2
            for rows in self.rows
        ]
        own = self._own_place()
        with unrolled(self.tiles) as tile:
            sums = [self._sum_of(group, self._place(own, tile, odd)) for odd in range(2)]
            for fragment in range(self.fragments):
                for half in range(2):
                    for odd in range(2):
                        i = (fragment * self.tiles + tile) * 4 + 2 * half + odd
                        more = None if of.int8 is None else zeros[fragment][half] * sums[odd]
                        self._total[i] = scaled(self._chain[i], scales[fragment][half], self._total[i], more)
                        self._chain[i] = T.Cast(self._kind, T.int32(0))

    def _sum_of(self, group: Expr, place: Expr) -> Expr:
        """The stored sum of an int8 row for its group: the sum of its numbers times −zero point, or times −1."""
        of = self._of
        if of.int8 is None:
            return T.int32(0)
        row = self._tile.row(let(T.min(place, self._tile.count - 1)))
        return let(of.k.raw("x", row * of.int8.words + (of.int8.number_words + 1) + group))

    def write(self) -> None:
        """Writes the results. Eight lanes write neighbouring columns of a row, which are whole sectors of memory."""
        if self.short is not None:
            self._locate()
        own = late(self._own_place())
        with unrolled(self.tiles) as tile, unrolled(2) as odd:
            place = self._place(own, tile, odd)
            with when(place < self._tile.count):
                row = self._tile.row(place)
                for fragment in range(0, self.fragments, self._of.parts):
                    for half in range(2):
                        self._write(fragment, tile, half, odd, row)

    def _write(self, fragment: int, tile: Expr, half: int, odd: Expr, row: Expr) -> None:
        parts = range(fragment, fragment + self._of.parts)
        totals = [self._total[(part * self.tiles + tile) * 4 + 2 * half + odd] for part in parts]
        column = self._columns[fragment][half]
        write_result(self._of, row, column, [self.rows[part][half] for part in parts], totals)


def scaled(chain: Expr, scale: Expr, total: Expr, more: Expr | None) -> Expr:
    """A total with one more scale group. more: of integers, what the zero point adds to their chain."""
    if more is None:
        return fma(chain, scale, total)
    return total + T.Cast("float32", let(chain + more)) * scale


def write_result(of: Layer, row: Expr, column: Expr, weight_rows: Sequence[Expr], totals: Sequence[Expr]) -> None:
    """Writes one result, if there is such a column. weight_rows, totals: of each part."""
    k, width = of.k, of.columns

    def value(part: int) -> Expr:
        """A finished sum, with the bias."""
        total = totals[part]
        if of.int8 is not None:
            total = total * T.reinterpret("float32", of.int8_word(row, T.int32(of.int8.number_words)))
        if of.p["bias"]:
            total = let(total, "float32") + k.raw("bias", weight_rows[part])
        return let(total, "float32")

    with when(column < width):
        found = value(0)
        if not of.act:
            if of.p.get("residual"):
                found = found + k.raw("residual", row * width + column)
            k.store("out", found, row * width + column)
            return
        stride = row_width(width, of.act)
        up = [value(1)] if of.parts == 2 else []
        k.store("out", activated(of.p, found, *up), row * stride + column)
        if stride > width:
            with when(column == width - 1):
                k.store("out", T.float32(0.0), row * stride + width)
