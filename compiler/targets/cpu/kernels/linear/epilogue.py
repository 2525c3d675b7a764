"""Finishes sums: scales, bias and residual; then writes a row of y, or the input of the activation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.linear.micro.base import MicroKernel
from llmc.compiler.targets.cpu.kernels.linear.places import Tile
from llmc.compiler.targets.cpu.kernels.linear.problem import Problem
from llmc.compiler.targets.cpu.kernels.linear.readers.base import Reader
from llmc.compiler.targets.cpu.kernels.linear.sums import Sums

Let = Callable[[b.Expr], b.Expr]


def _as_is(value: b.Expr) -> b.Expr:
    return value


class Epilogue:
    """Epilogue of one kernel `k`. sums: where the activation finds them; None: there is none."""

    def __init__(self, p: Problem, k: b.Kernel, reader: Reader, micro: MicroKernel, sums: Sums | None) -> None:
        self.p, self.k, self.reader, self.micro, self._sums = p, k, reader, micro, sums

    @property
    def nothing(self) -> bool:
        """Whether finished sums go to the activation unchanged."""
        return bool(self.p.activated) and not self.p.quantized and not self.p.bias

    def add_bias(self, tile: Tile, total: b.Vectors) -> None:
        """Adds the bias to all rows of a tile at once."""
        vectors = len(tile.panels) * self.p.vectors
        if self.p.bias:
            for at, _, _, first, count in self._vectors(tile, _as_is):
                shift = b.kept(self._bias(tile, first, count))
                for i in range(len(tile.rows)):
                    total[i * vectors + at] = b.call("add", total[i * vectors + at], shift)

    def row(
        self,
        tile: Tile,
        i: int,
        r: b.Expr,
        total: b.Vectors | Sequence[b.Expr],
        *,
        biased: bool = False,
        let: Let = _as_is,
    ) -> None:
        """Row r, the tile's i-th row. biased: its sums already contain their bias. let: binds positions."""
        p = self.p
        scales = self.reader.scales(tile.panels, T.int32(0)) if not p.grouped else None
        zeros = self.reader.zeros_of_sums(tile.panels, T.int32(0)) if not p.grouped else None
        offsets = self.reader.offsets(tile.panels, T.int32(0)) if not p.grouped else None
        vectors = len(tile.panels) * p.vectors
        for at, place, v, first, count in self._vectors(tile, let):
            value = total[i * vectors + at]
            if scales is not None:
                zero = None if zeros is None else zeros[at]
                value = b.call("mul", self.micro.as_float(value, zero, tile.x0, r, T.int32(0)), scales[at])
            if offsets is not None:
                value = b.call("fma", self.micro.sum_of_row(tile.x0, r, T.int32(0)), offsets[at], value)
            if (factor := self.micro.row_factor(tile.x0, r)) is not None:
                value = b.call("mul", value, factor)
            if self.reader.factor is not None:
                value = b.call("mul", value, b.splat(self.reader.factor))
            if p.bias and not biased:
                value = b.call("add", value, self._bias(tile, first, count))
            if p.activated:
                assert self._sums is not None
                self._sums.store(value, place, tile.t_local, r, v)
                continue
            where = let((tile.t * p.tile + r) * p.n + first)
            if p.residual:
                value = b.call("add", value, b.load_vector(self.k["residual"], where, count))
            b.store_vector(self.k["y"], value, where, count)

    def _vectors(self, tile: Tile, let: Let) -> Iterator[tuple[int, b.Expr, int, b.Expr, b.Expr]]:
        """For each vector of a tile's row: its number, place, number in the panel, first column and count of
        columns."""
        p = self.p
        for i, (column, place) in enumerate(zip(tile.columns, tile.places, strict=True)):
            for v in range(p.vectors):
                first = let(column + v * b.WIDTH)
                yield i * p.vectors + v, place, v, first, b.WIDTH if p.width % p.columns == 0 else p.width - first

    def _bias(self, tile: Tile, first: b.Expr, count: b.Expr) -> b.Expr:
        start = first if self.p.parts == 1 else tile.part * self.p.width + first
        return b.load_vector(self.k["bias"], start, count)
