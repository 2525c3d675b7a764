"""Micro-kernels: multiply one operand of the weight by one of the activation and add to sums of 16 columns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.linear.places import Tile, Walk
from llmc.compiler.targets.cpu.kernels.linear.problem import Problem

F32, BF16X2, U8X4, S16X2, B16X2 = "f32", "bf16x2", "u8x4", "s16x2", "b16x2"
"""Operands of the weight, per lane: a float32; two bf16 of a word; four unsigned bytes of a word; two signed 16-bit
numbers (elements 0 and 2 of a line, 1 and 3, 4 and 6, 5 and 7); two bf16 in that order."""
DTYPE = {F32: "float32", BF16X2: "int32", U8X4: "int32", S16X2: "int32", B16X2: "int32"}


class MicroKernel(ABC):
    """A micro-kernel for one problem. Call `bind` before any method that emits code.

    operand: of the weight. sums: TIR dtype of a lane of one group's sums.
    """

    operand: ClassVar[str]
    sums: ClassVar[str] = "float32"

    def __init__(self, p: Problem) -> None:
        self.p = p

    @staticmethod
    @abstractmethod
    def suits(p: Problem) -> bool:
        """Whether it supports the problem's activations, and the target has its instructions."""

    def helpers(self) -> str:
        """IR text it needs in addition to that of `ir.vector`."""
        return ""

    def bind(self, k: b.Kernel) -> None:
        """Stores the buffers of the kernel that is being written."""
        self.x = k["x"]

    def hold(self, tiles: int, middle: int, blocks: tuple[int, Walk] | None) -> None:  # noqa: B027
        """Reserves stack for `tiles` whole row tiles, if any. middle: offset that makes the weight's numbers too large.
        blocks: arguments of a later `BlockMicroKernel.in_blocks`; None: it is not called."""

    def prepare(self, tile0: b.Expr, tiles: b.Expr) -> None:  # noqa: B027
        """Call before row tiles [tile0, tile0 + tiles) are multiplied."""

    def start_of(self, t: b.Expr, t_local: b.Expr) -> b.Expr:
        """Start of row tile t in the activations; t_local is its number among the tiles on the stack."""
        return t * self.p.tile_words

    def start(self, x0: b.Expr, r: b.Expr, group: b.Expr) -> b.Expr:
        """Initial value of the sum of a group of row r."""
        return b.splat(0.0)

    @abstractmethod
    def multiply(self, acc: b.Expr, weight: b.Expr, value: b.Expr) -> b.Expr:
        """acc + weight · value."""

    def values(self, tile: Tile, line: b.Expr, local: b.Expr) -> Callable[[int, int], b.Expr]:
        """The activations for a line of the weight: a function of a row and an operand of the line, broadcast to every
        lane. local: number of the line in its block."""
        p = self.p
        return lambda r, unit: b.splat(self.word(tile.x0 + (line * p.x_line + unit) * p.tile + r))

    def word(self, at: b.Expr) -> b.Expr:
        """A word of the activations in the form that is multiplied, if each operand of the weight takes one word."""
        return self.x[at]

    def rereads(self, unit: int) -> bool:
        """Whether activations for operand `unit` of a line should be read from memory again."""
        return False

    def as_float(self, value: b.Expr, zero: b.Expr | None, x0: b.Expr, r: b.Expr, group: b.Expr) -> b.Expr:
        """A finished sum of a group of row r as a float. zero: zero points still to be subtracted, if any."""
        return value

    def sum_of_row(self, x0: b.Expr, r: b.Expr, group: b.Expr) -> b.Expr:
        """Sum of the activations of a group of row r in every lane, times −middle, or −1 if middle is 0."""
        raise NotImplementedError

    def row_factor(self, x0: b.Expr, r: b.Expr) -> b.Expr | None:
        """Final factor on the sums of row r, in every lane; None: no factor."""
        return None


class BlockMicroKernel(MicroKernel):
    """A micro-kernel that first converts activations, once for all panels: for a problem whose plan `widens`."""

    @abstractmethod
    def in_blocks(self, k: b.Kernel, tiles: int, walk: Walk) -> BlockMicroKernel:
        """The same, bound, for up to `tiles` row tiles and one block of K at a time."""

    @abstractmethod
    def prepare_block(self, t: b.Expr, t_local: b.Expr, kb: b.Expr, length: b.Expr) -> None:
        """Call before block kb, of `length` lines, of row tile t is multiplied; t_local is its number on the stack."""
