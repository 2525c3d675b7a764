"""Products in AMX tile registers: 32 rows × a panel of columns, 64 bytes of K a step.

Six registers hold sums, one 16 rows, one 16 columns. A panel's words lie as the instruction takes columns. Activations
lie word by word too and are needed row by row: those of a chunk are copied once, for all panels.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels import tile_ir
from llmc.compiler.targets.cpu.kernels.sums import Sums

ROWS = 2 * tile_ir.LINES
"""Rows that are computed at a time."""
_A, _B = 6, 7  # registers of rows and of columns
_TILE_WORDS = tile_ir.LINES * tile_ir.WORDS


class TileRegisters:
    """Emits their instructions in a kernel whose activations `x` are [row tiles][tile_words], `words` of K first, each
    of `row_tile` rows.

    kind: of products (`tile_ir.instructions`); columns: of a panel; chunk_tiles: row tiles of a chunk at most, which
    fill whole registers.
    """

    def __init__(
        self, kind: str, x: b.Expr, row_tile: int, words: int, tile_words: int, columns: int, chunk_tiles: int
    ) -> None:
        self._kind, self._x, self._row_tile, self._columns = kind, x, row_tile, columns
        self._words, self._tile_words, self._vectors = words, tile_words, columns // b.WIDTH
        self.of_register = tile_ir.LINES // row_tile
        """Row tiles of a register."""
        self.whole_steps, self.tail = divmod(words, tile_ir.WORDS)
        """Steps of K without padding, and the words past them."""
        self.steps = b.ceil_div(words, tile_ir.WORDS)
        self._rows = b.Scratch(chunk_tiles // self.of_register * self.steps * _TILE_WORDS, "int32")

    @staticmethod
    def helpers(kind: str, row_tile: int, words: int, columns: int) -> str:
        """The IR text that they need."""
        vectors = columns // b.WIDTH
        dots = [(m * vectors + v, _A, _B) for m in range(2) for v in range(vectors)]
        copies = {tile_ir.WORDS, words % tile_ir.WORDS or tile_ir.WORDS}
        return tile_ir.instructions(kind, dots) + tile_ir.rows_helpers(row_tile, copies)

    def _place(self, t: b.Expr, step: b.Expr) -> b.Expr:
        """Where a step's copy of row tile t of the chunk is."""
        register = T.truncdiv(t, self.of_register)
        line = (t - register * self.of_register) * self._row_tile
        return b.let((register * self.steps + step) * _TILE_WORDS + line * tile_ir.WORDS)

    def copy_rows(self, tile0: b.Expr, tiles: b.Expr) -> None:
        """Starts a chunk: row tiles [tile0, tile0 + tiles), K padded with zeros."""

        def copy(t: b.Expr, step: b.Expr, words: int) -> None:
            at = b.let((tile0 + t) * self._tile_words + step * (tile_ir.WORDS * self._row_tile))
            b.do(f"tile_rows_{words}", b.at(self._x, at), self._rows.at(self._place(t, step)))

        with T.serial(tiles) as t:
            with T.serial(self.whole_steps) as step:
                copy(t, b.let(step), tile_ir.WORDS)
            if self.tail:
                copy(t, T.int32(self.whole_steps), self.tail)

    def begin(self, registers: int, kb: b.Expr, blocks: int, sums: Sums, place: b.Expr, t: b.Expr) -> None:
        """The sums before block kb of K, of `blocks`: none, or those of row tiles from t on that were stored."""
        if blocks == 1:
            self.zero(registers)
            return
        with T.If(kb == 0):
            with T.Then():
                self.zero(registers)
            with T.Else():
                self.load(registers, sums, place, t)

    def zero(self, registers: int) -> None:
        """The sums of `registers` registers of rows, 1 or 2."""
        for i in range(registers * self._vectors):
            b.do(f"tile_zero_{i}")

    def load(self, registers: int, sums: Sums, place: b.Expr, t: b.Expr) -> None:
        """The sums of row tiles from t on."""
        self._move("load", registers, sums, place, t)

    def store(self, registers: int, sums: Sums, place: b.Expr, t: b.Expr) -> None:
        """The reverse; rows that a chunk lacks to fill registers are written too."""
        self._move("store", registers, sums, place, t)

    def _move(self, name: str, registers: int, sums: Sums, place: b.Expr, t: b.Expr) -> None:
        for m in range(registers):
            for v in range(self._vectors):
                where = sums.address(place, t + m * self.of_register, 0, v)
                b.do(f"tile_{name}_{m * self._vectors + v}", where, self._columns * 4)

    def step(self, registers: int, first: b.Expr, step: b.Expr, columns: Callable[[int], b.Expr]) -> None:
        """Adds a step of K, of row tiles from `first` of the chunk on. columns: address of the first word of a vector
        of the panel, whose other words follow each a line of the panel later."""
        order = list(range(self._vectors))
        for m in range(registers):
            rows = self._place(b.let(first + m * self.of_register), step)
            b.do(f"tile_load_{_A}", self._rows.at(rows), tile_ir.LINE_BYTES)
            for i, v in enumerate(order):
                if i or not m:  # the last columns of the first rows are the first of the others
                    b.do(f"tile_load_{_B}", columns(v), self._columns * 4)
                b.do(f"tile_dot_{self._kind}_{m * self._vectors + v}_{_A}_{_B}")
            order.reverse()
