"""Micro-kernels: what one operand of the weight and one of an activation do to sums of 16 columns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.linear.places import Tile, Walk
from llmc.compiler.targets.cpu.kernels.linear.problem import Problem

F32, BF16X2, U8X4, S16X2, B16X2 = "f32", "bf16x2", "u8x4", "s16x2", "b16x2"
"""Operands of the weight, in each lane: a float32, two bf16 of a word, four unsigned bytes of a word, two signed 16-bit
numbers: elements 0 and 2 of a line, 1 and 3, 4 and 6, 5 and 7; two bf16 in that order."""
DTYPE = {F32: "float32", BF16X2: "int32", U8X4: "int32", S16X2: "int32", B16X2: "int32"}


class MicroKernel(ABC):
    """For one problem. `bind` comes before all that emits code.

    operand: of the weight; sums: TIR dtype of a lane of the sums of one group.
    """

    operand: ClassVar[str]
    sums: ClassVar[str] = "float32"

    def __init__(self, p: Problem) -> None:
        self.p = p

    @staticmethod
    @abstractmethod
    def suits(p: Problem) -> bool:
        """Whether it takes a problem's activations, and the target has its instructions."""

    def helpers(self) -> str:
        """The IR text that it needs beside `ir.vector`'s."""
        return ""

    def bind(self, k: b.Kernel) -> None:
        """Takes the buffers of the kernel that is being written."""
        self.x = k["x"]

    def hold(self, tiles: int, middle: int, blocks: tuple[int, Walk] | None) -> None:  # noqa: B027
        """Takes what so many row tiles need of the stack. middle: what the weight's numbers are too large by; blocks:
        what `BlockMicroKernel.in_blocks` will be called with, if at all."""

    def prepare(self, tile0: b.Expr, tiles: b.Expr) -> None:  # noqa: B027
        """Comes before row tiles [tile0, tile0 + tiles) are multiplied."""

    def start_of(self, t: b.Expr, t_local: b.Expr) -> b.Expr:
        """Where row tile t starts in the activations, as number t_local of those that are held."""
        return t * self.p.tile_words

    def start(self, x0: b.Expr, r: b.Expr, group: b.Expr) -> b.Expr:
        """A sum of a group of row r before its first product."""
        return b.splat(0.0)

    @abstractmethod
    def multiply(self, acc: b.Expr, weight: b.Expr, value: b.Expr) -> b.Expr:
        """acc + weight · value."""

    def values(self, tile: Tile, line: b.Expr, local: b.Expr) -> Callable[[int, int], b.Expr]:
        """The activations that a line of the weight is multiplied by: of a row and an operand of the line, in every
        lane. local: the line within its block."""
        p = self.p
        return lambda r, unit: b.splat(self.word(tile.x0 + (line * p.x_line + unit) * p.tile + r))

    def word(self, at: b.Expr) -> b.Expr:
        """A word of the activations as it is multiplied, where each operand of the weight takes one."""
        return self.x[at]

    def rereads(self, unit: int) -> bool:
        """Whether activations for operand `unit` of a line had better be read from memory again."""
        return False

    def as_float(self, value: b.Expr, zero: b.Expr | None, x0: b.Expr, r: b.Expr, group: b.Expr) -> b.Expr:
        """A finished sum of a group of row r. zero: the zero points that it lacks, if any."""
        return value

    def sum_of_row(self, x0: b.Expr, r: b.Expr, group: b.Expr) -> b.Expr:
        """The activations of a group of row r added up, times −middle, or −1 where that is 0, in every lane."""
        raise NotImplementedError

    def row_factor(self, x0: b.Expr, r: b.Expr) -> b.Expr | None:
        """What the sums of row r are multiplied by in the end, in every lane."""
        return None


class BlockMicroKernel(MicroKernel):
    """One that makes other operands of activations first, for all panels at once: of a problem whose plan `widens`."""

    @abstractmethod
    def in_blocks(self, k: b.Kernel, tiles: int, walk: Walk) -> BlockMicroKernel:
        """The same for up to `tiles` row tiles a block of K at a time, bound."""

    @abstractmethod
    def prepare_block(self, t: b.Expr, t_local: b.Expr, kb: b.Expr, length: b.Expr) -> None:
        """Comes before block kb, of `length` lines, of row tile t is multiplied, number t_local of those held."""
