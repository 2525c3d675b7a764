"""Sums of a tile of rows between two passes, and what becomes of those of a gated linear layer in the end."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b

GATED = ("", *b.LANES)
"""The dtype of the packed activation silu(gate) · up; empty: the layer has no gate."""

_ROWS_AT_ONCE = 8  # of put_tile_bf16


class Sums:
    """Vectors of sums on the stack, [places][tiles][row_tile][columns]: a layer's output is far apart in memory, row
    by row, and would not stay in cache until the next pass."""

    def __init__(self, places: int, tiles: int, row_tile: int, columns: int) -> None:
        self._tiles, self._row_tile, self._columns = tiles, row_tile, columns
        self._memory = b.Scratch(places * tiles * row_tile * columns, "float32")

    def _at(self, place: b.Expr, t: b.Expr, r: b.Expr, v: b.Expr) -> b.Expr:
        return ((place * self._tiles + t) * self._row_tile + r) * self._columns + v * b.WIDTH

    def address(self, place: b.Expr, t: b.Expr, r: b.Expr, v: b.Expr) -> b.Expr:
        """Address of a vector; those of the next row, also of the next tile's, are `columns` further."""
        return self._memory.at(self._at(place, t, r, v))

    def load(self, place: b.Expr, t: b.Expr, r: b.Expr, v: b.Expr) -> b.Expr:
        """Vector v of row r of tile t."""
        return self._memory.vector(self._at(place, t, r, v))

    def store(self, value: b.Expr, place: b.Expr, t: b.Expr, r: b.Expr, v: b.Expr) -> None:
        self._memory.store(value, self._at(place, t, r, v))


class GatedOutput:
    """Writes silu(gate) · up of `width` columns, from two places of sums, as an activation of dtype `gated`."""

    def __init__(self, gated: str, width: int, row_tile: int, columns: int) -> None:
        self.width, self.act = width, gated
        self.row_tile, self.columns = row_tile, columns
        self.tail = width % b.WIDTH

    def dtype(self) -> str:
        """TIR dtype of the output buffer."""
        return b.word_dtype(self.act)

    def puts(self) -> tuple[tuple[str, int, int], ...]:
        """What `vector_ir.helpers` is asked for."""
        return tuple((self.act, self.row_tile, count) for count in (b.WIDTH, self.tail) if count)

    def write(
        self, y: b.Expr, sums: Sums, places: tuple[b.Expr, b.Expr], panel: b.Expr, t: b.Expr, t_local: b.Expr,
        num_rows: b.Expr, meanwhile: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """Row tile t (t_local in `sums`) of a panel of columns; places: of gate and of up. meanwhile: emits what else
        is done before each vector of columns."""
        rows = b.let(T.min(num_rows - t * self.row_tile, self.row_tile))

        def value(r: b.Expr, v: b.Expr) -> b.Expr:
            gate, up = (sums.load(place, t_local, r, v) for place in places)
            found = b.Vectors(1)
            found[0] = b.call("mul", b.call("silu", gate), up)
            return found[0]

        def row_by_row(v: b.Expr, first: b.Expr) -> None:
            with T.serial(rows) as r:
                self._pack(y, value(r, v), b.let(t * self.row_tile + r), first)

        with T.serial(self.columns // b.WIDTH) as v:
            if meanwhile:
                meanwhile()
            first = b.let(panel * self.columns + v * b.WIDTH)
            if self.act == "bf16" and self.row_tile == _ROWS_AT_ONCE:
                with T.If(T.And(rows == self.row_tile, first + b.WIDTH <= self.width)):
                    with T.Then():
                        at = (t * b.ceil_div(self.width, 2) + T.truncdiv(first, 2)) * self.row_tile
                        b.do("put_tile_bf16", *(value(r, v) for r in range(self.row_tile)), b.at(y, at))
                    with T.Else():
                        row_by_row(v, first)
            else:
                row_by_row(v, first)

    def _pack(self, y: b.Expr, value: b.Expr, row: b.Expr, first: b.Expr) -> None:
        base = b.packed_position(row, self.row_tile, b.ceil_div(self.width, b.lanes_of(self.act)))
        with b.when(first + b.WIDTH <= self.width):
            b.put(y, value, base, first, self.act, self.row_tile, b.WIDTH)
        if self.tail:
            with b.when(first == self.width - self.tail):
                b.put(y, value, base, first, self.act, self.row_tile, self.tail)
