"""Products in AMX tile registers: 32 rows × a panel of columns, 64 bytes of K a step.

Six registers hold sums, one holds 16 rows, one 16 columns. A panel's words are stored as the instruction expects
columns. Activations are stored word by word as well but needed row by row: those of a chunk are copied once for all
panels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.ir import tiles as ir
from llmc.compiler.targets.cpu.kernels.linear.problem import Problem
from llmc.compiler.targets.cpu.kernels.linear.sums import Sums

ROWS = 2 * ir.LINES
"""Rows computed at a time."""
_A, _B = 6, 7  # registers of rows and of columns
_TILE_WORDS = ir.LINES * ir.WORDS


class TileRegisters(ABC):
    """Emits the tile instructions of a kernel, for chunks of at most `chunk_tiles` row tiles that fill whole registers.
    kind: kind of products (`ir.tiles.instructions`)."""

    kind: ClassVar[str]

    def __init__(self, p: Problem, x: b.Expr, chunk_tiles: int) -> None:
        self.p, self.chunk_tiles, self._x, self._stride = p, chunk_tiles, x, p.columns * 4
        self.of_register = ir.LINES // p.tile
        """Row tiles of a register."""
        self.whole_steps, self.tail = divmod(p.x_words, ir.WORDS)
        """Steps of K without padding, and the words past them."""
        self.steps = b.ceil_div(p.x_words, ir.WORDS)
        self._rows = b.Scratch(chunk_tiles // self.of_register * self.steps * _TILE_WORDS, "int32")

    @staticmethod
    @abstractmethod
    def suits(p: Problem) -> bool:
        """Whether tile registers can compute rows of this problem."""

    @classmethod
    def helpers(cls, p: Problem) -> str:
        """IR text of the helpers they need."""
        dots = [(m * p.vectors + v, _A, _B) for m in range(2) for v in range(p.vectors)]
        copies = {ir.WORDS, p.x_words % ir.WORDS or ir.WORDS}
        return ir.instructions(cls.kind, dots) + ir.rows_helpers(p.tile, copies)

    def _place(self, t: b.Expr, step: b.Expr) -> b.Expr:
        """Address of a step's copy of row tile t of the chunk."""
        register = T.truncdiv(t, self.of_register)
        line = (t - register * self.of_register) * self.p.tile
        return b.let((register * self.steps + step) * _TILE_WORDS + line * ir.WORDS)

    def copy_rows(self, tile0: b.Expr, tiles: b.Expr) -> None:
        """Starts a chunk: row tiles [tile0, tile0 + tiles), K padded with zeros."""

        def copy(t: b.Expr, step: b.Expr, words: int) -> None:
            at = b.let((tile0 + t) * self.p.tile_words + step * (ir.WORDS * self.p.tile))
            b.do(f"tile_rows_{words}", b.at(self._x, at), self._rows.at(self._place(t, step)))

        with T.serial(tiles) as t:
            with T.serial(self.whole_steps) as step:
                copy(t, b.let(step), ir.WORDS)
            if self.tail:
                copy(t, T.int32(self.whole_steps), self.tail)

    def begin(self, registers: int, kb: b.Expr, blocks: int, sums: Sums, place: b.Expr, t: b.Expr) -> None:
        """Loads the sums before block kb of K, of `blocks` blocks: zero, or the stored sums of row tiles from t on."""
        if blocks == 1:
            self.zero(registers)
            return
        with T.If(kb == 0):
            with T.Then():
                self.zero(registers)
            with T.Else():
                self._move("load", registers, sums, place, t)

    def zero(self, registers: int) -> None:
        """Zeroes the sums of `registers` registers of rows, 1 or 2."""
        for i in range(registers * self.p.vectors):
            b.do(f"tile_zero_{i}")

    def store(self, registers: int, sums: Sums, place: b.Expr, t: b.Expr) -> None:
        """Stores the sums of row tiles from t on, including rows that the chunk lacks to fill registers."""
        self._move("store", registers, sums, place, t)

    def _move(self, name: str, registers: int, sums: Sums, place: b.Expr, t: b.Expr) -> None:
        for m in range(registers):
            for v in range(self.p.vectors):
                where = sums.address(place, t + m * self.of_register, 0, v)
                b.do(f"tile_{name}_{m * self.p.vectors + v}", where, self._stride)

    def step(self, registers: int, first: b.Expr, step: b.Expr, columns: Callable[[int], b.Expr]) -> None:
        """Adds one step of K for row tiles from `first` of the chunk on. columns: address of the first word of a vector
        of the panel; its other words follow one line of the panel apart."""
        order = list(range(self.p.vectors))
        for m in range(registers):
            rows = self._place(b.let(first + m * self.of_register), step)
            b.do(f"tile_load_{_A}", self._rows.at(rows), ir.LINE_BYTES)
            for i, v in enumerate(order):
                if i or not m:  # the last columns for the first rows are loaded already
                    b.do(f"tile_load_{_B}", columns(v), self._stride)
                b.do(f"tile_dot_{self.kind}_{m * self.p.vectors + v}_{_A}_{_B}")
            order.reverse()


class AmxBf16(TileRegisters):
    """bf16 for any number of rows: the instruction's own arithmetic.

    TDPBF16PS sums the products of even and of odd elements of a step in two ascending chains of fma from 0. It adds the
    two chains, then adds the result to the previous sum. Denormals are 0. K starts at 0 for every row and ascends.
    """

    kind = "bf16"

    @staticmethod
    def suits(p: Problem) -> bool:
        return p.target.bf16_tiles and p.kind == "bf16"


class AmxInt8(TileRegisters):
    """int8 for many rows: sums are exact integers, so the bits equal those of every other method. With several groups,
    each is a whole number of steps, and its sums are stored and merged as floats."""

    kind = "s8u8"

    @staticmethod
    def suits(p: Problem) -> bool:
        steps = p.groups == 1 or p.group_lines % p.step_lines == 0
        return p.target.int8_tiles and p.integer and p.tile == p.target.row_tile and steps
