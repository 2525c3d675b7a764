"""Output of a layer with an activation: f(x), or f(gate) · up of a gated layer, packed for the next layer.

Of experts with a limit: gate · sigmoid(gain · gate) · (up + 1), with gate clipped to (−∞, limit] and up to
[−limit, limit].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm.script.ir_builder import tirx as T

from llmc.compiler.dtypes import HALVES
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.ir import activations, gates, stores
from llmc.compiler.targets.cpu.kernels.linear.sums import Sums

DTYPES = ("", *b.LANES)
"""Dtypes of a packed result; empty: the layer has no activation."""


class ActivatedOutput:
    """Writes activated columns, `width` of them, from the sums of each part, as activations of dtype `act`.

    activation: its name. limit: 0 for none.
    """

    def __init__(
        self, act: str, activation: str, width: int, row_tile: int, columns: int, *, limit: float = 0.0,
        gain: float = 1.0,
    ) -> None:  # fmt: skip
        self.width, self.act, self.activation = width, act, activation
        self.limit, self.gain = limit, gain
        self.row_tile, self.columns = row_tile, columns
        self.tail = width % b.WIDTH

    def dtype(self) -> str:
        """TIR dtype of the output buffer."""
        return b.word_dtype(self.act)

    def helpers(self) -> str:
        """IR text of helpers in addition to `ir.vector.helpers`."""
        return gates.limited(self.limit, self.gain) if self.limit else activations.ACTIVATIONS[self.activation]()

    def puts(self) -> tuple[tuple[str, int, int], ...]:
        """Arguments for `ir.vector.helpers`."""
        return tuple((self.act, self.row_tile, count) for count in (b.WIDTH, self.tail) if count)

    def write(
        self, y: b.Expr, sums: Sums, places: Sequence[b.Expr], panel: b.Expr, t: b.Expr, t_local: b.Expr,
        num_rows: b.Expr, meanwhile: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """Writes row tile t (t_local in `sums`) of a panel of columns. places: of each part. meanwhile: emits other
        work before each vector of columns."""
        rows = b.let(T.min(num_rows - t * self.row_tile, self.row_tile))

        def value(r: b.Expr, v: b.Expr) -> b.Expr:
            found = b.Vectors(1)
            found[0] = self._activated(*(sums.load(place, t_local, r, v) for place in places))
            return found[0]

        def row_by_row(v: b.Expr, first: b.Expr) -> None:
            with T.serial(rows) as r:
                self._pack(y, value(r, v), b.let(t * self.row_tile + r), first)

        with T.serial(self.columns // b.WIDTH) as v:
            if meanwhile:
                meanwhile()
            first = b.let(panel * self.columns + v * b.WIDTH)
            if (self.row_tile, b.WIDTH) == stores.TILE and self.act in HALVES:
                with T.If(T.And(rows == self.row_tile, first + b.WIDTH <= self.width)):
                    with T.Then():
                        at = (t * b.ceil_div(self.width, 2) + T.truncdiv(first, 2)) * self.row_tile
                        b.do(stores.tile_name(self.act), *(value(r, v) for r in range(self.row_tile)), b.at(y, at))
                    with T.Else():
                        row_by_row(v, first)
            else:
                row_by_row(v, first)

    def _activated(self, x: b.Expr, up: b.Expr | None = None) -> b.Expr:
        """up: of a gated layer, whose gate x is."""
        if self.limit:
            return b.call("limited_gate", x, up)
        value = b.call(self.activation, x)
        return value if up is None else b.call("mul", value, up)

    def _pack(self, y: b.Expr, value: b.Expr, row: b.Expr, first: b.Expr) -> None:
        base = b.packed_position(row, self.row_tile, b.ceil_div(self.width, b.lanes_of(self.act)))
        with b.when(first + b.WIDTH <= self.width):
            b.put(y, value, base, first, self.act, self.row_tile, b.WIDTH)
        if self.tail:
            with b.when(first == self.width - self.tail):
                b.put(y, value, base, first, self.act, self.row_tile, self.tail)
