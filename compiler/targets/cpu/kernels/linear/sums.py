"""Sums of a tile of rows between two passes over the weight."""

from __future__ import annotations

from llmc.compiler.targets.cpu.kernels import builder as b


class Sums:
    """Vectors of sums on the stack, [places][tiles][row_tile][columns]. In a layer's output, rows are far apart in
    memory and would not stay in cache until the next pass."""

    def __init__(self, places: int, tiles: int, row_tile: int, columns: int) -> None:
        self._tiles, self._row_tile, self._columns = tiles, row_tile, columns
        self._memory = b.Scratch(places * tiles * row_tile * columns, "float32")

    def _at(self, place: b.Expr, t: b.Expr, r: b.Expr, v: b.Expr) -> b.Expr:
        return ((place * self._tiles + t) * self._row_tile + r) * self._columns + v * b.WIDTH

    def address(self, place: b.Expr, t: b.Expr, r: b.Expr, v: b.Expr) -> b.Expr:
        """Address of a vector; the next row, also of the next tile, is `columns` further."""
        return self._memory.at(self._at(place, t, r, v))

    def load(self, place: b.Expr, t: b.Expr, r: b.Expr, v: b.Expr) -> b.Expr:
        """Vector v of row r of tile t."""
        return self._memory.vector(self._at(place, t, r, v))

    def store(self, value: b.Expr, place: b.Expr, t: b.Expr, r: b.Expr, v: b.Expr) -> None:
        self._memory.store(value, self._at(place, t, r, v))
