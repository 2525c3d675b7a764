"""Readers turn the packed panels of a weight into operands of a micro-kernel; this file is common to all formats.

A panel is a sequence of lines of K, each with the words of all columns. A reader loads a word of 16 columns at a time
and turns it into operands of the micro-kernel's kind, ascending in K.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.linear.micro.base import DTYPE, MicroKernel
from llmc.compiler.targets.cpu.kernels.linear.places import Tile
from llmc.compiler.targets.cpu.kernels.linear.problem import Problem
from llmc.compiler.targets.cpu.target import Target


class OfGroup(Protocol):
    """Facts of a group that its operands depend on, such as zero points, by vectors of columns."""

    def __getitem__(self, v: int) -> b.Expr: ...


class Lines(Protocol):
    """Adds packed lines to the sums of a tile in the format's own way."""

    def start(self, tile: Tile, acc: b.Vectors) -> None:
        """The sums before the first line."""

    def add(self, tile: Tile, acc: b.Vectors, line0: b.Expr, line1: b.Expr) -> None:
        """Adds lines [line0, line1)."""


class Reader(ABC):
    """Reads a problem's weight as operands of a kind (`micro.base`). Call `bind` before any method that emits code.

    units: operands per line. line_words: words per line. kept: whether a loaded word stays in a register. as_it_lies:
    whether an operand is a word in memory, so that blocks for many rows need no unpacking. unpacked_for_few: whether
    unpacking pays even for few row tiles.
    """

    units_of: ClassVar[Mapping[str, int]]
    """Operands per line, by the kinds that the weight can become."""
    line_words: ClassVar[int] = 1
    kept: ClassVar[bool] = False
    as_it_lies = False
    unpacked_for_few = False

    def __init__(self, p: Problem, operand: str) -> None:
        self.p, self.operand, self.units, self.dtype = p, operand, self.units_of[operand], DTYPE[operand]
        # Layout in memory; at most line_vectors vectors per line.
        self.panel_words = p.lines * self.line_words
        self.line_vectors = self.line_words * p.vectors
        self.line_bytes = 4 * self.line_words * p.columns

    @staticmethod
    def helpers(target: Target) -> str:
        """IR text it needs in addition to that of `ir.vector`."""
        return ""

    def bind(self, k: b.Kernel) -> None:
        """Stores the buffers of the kernel that is being written."""
        self.w = k["w"]

    def position(self, panel: b.Expr, line: b.Expr) -> b.Expr:
        """Start of a line of a panel."""
        return (panel * self.panel_words + line * self.line_words) * self.p.columns

    def share(self, panel: b.Expr, line: b.Expr) -> b.Expr:
        """Start of the `line_vectors` vectors that are prefetched with a line; all lines together cover the whole
        panel."""
        return self.position(panel, line)

    def word_of(self, unit: int) -> int:
        """Number of the word in a line that contains operand `unit`."""
        return unit * self.line_words // self.units

    def word(self, panel: b.Expr, line: b.Expr, v: int, i: int) -> b.Expr:
        """Word i of a line, 16 columns."""
        word = self.w[T.ramp(self.position(panel, line) + (i * self.p.columns + v * b.WIDTH), 1, b.WIDTH)]
        return b.kept(word, "int32") if self.kept else word

    def fetch(self, position: b.Expr, level: int = 1) -> None:
        """Prefetches a vector of the weight into the given cache level."""
        b.do("prefetch_l2" if level == 2 else "prefetch", b.at(self.w, position))

    fetch_group: Callable[[b.Expr, b.Expr], None] | None = None
    """Prefetches what a panel stores beside a group of numbers, if few rows read it line by line."""

    @abstractmethod
    def operand_of(self, word: b.Expr, unit: int, of_group: OfGroup | None, v: int) -> b.Expr:
        """Operand `unit` of a line, from the word that contains it. of_group: result of `group_of`; v: number of the
        vector."""

    def group_of(self, panels: Sequence[b.Expr], group: b.Expr) -> OfGroup | None:
        """What `operand_of` needs about a group of some panels, if anything. Valid until the next call."""
        return None

    def lines(self, micro: MicroKernel) -> Lines | None:
        """How packed lines are multiplied, if not operand by operand."""
        return None

    # ---- of sums ----------------------------------------------------------------------------------------------------

    def scales(self, panels: Sequence[b.Expr], group: b.Expr) -> b.Vectors | None:
        """Factor on the sums of a group."""
        return None

    def zeros_of_sums(self, panels: Sequence[b.Expr], group: b.Expr) -> b.Vectors | None:
        """Zero points still missing from the sums of a group."""
        return None

    def offsets(self, panels: Sequence[b.Expr], group: b.Expr) -> b.Vectors | None:
        """Factor on the sum of a group's activations (`MicroKernel.sum_of_row`), a term still missing from the sums."""
        return None

    @property
    def middle(self) -> int:
        """Offset that makes numbers too large in pairs of s16; 0 if zero points are stored."""
        return 0

    @property
    def factor(self) -> float | None:
        """Final factor on the sums of a row."""
        return None

    # ---- unpacking --------------------------------------------------------------------------------------------------

    @property
    def by_group(self) -> bool:
        """Whether `group_of` returns anything."""
        return False

    def unpack(self, wide: b.Scratch, panel: b.Expr, line0: b.Expr, length: b.Expr) -> None:
        """Writes the operands of lines [line0, line0 + length) of a panel to `wide`."""
        p = self.p
        if not self.by_group:
            with T.serial(length) as line:
                self._unpack_line(wide, panel, line0, line, None)
            return
        with T.serial(b.let(T.truncdiv(length + (p.number_group_lines - 1), p.number_group_lines))) as group:
            first = b.let(group * p.number_group_lines)
            found = self.group_of([panel], b.let(T.truncdiv(line0, p.number_group_lines) + group))
            here = b.let(T.min(length - first, p.number_group_lines))
            with T.serial(here) as line:
                self._unpack_line(wide, panel, line0, first + line, found)

    def _unpack_line(
        self, wide: b.Scratch, panel: b.Expr, line0: b.Expr, line: b.Expr, of_group: OfGroup | None
    ) -> None:
        for v in range(self.p.vectors):
            words = [self.word(panel, line0 + line, v, i) for i in range(self.line_words)]
            of_unit = [words[self.word_of(unit)] for unit in range(self.units)]
            for unit, value in enumerate([self.operand_of(word, u, of_group, v) for u, word in enumerate(of_unit)]):
                wide.store(value, (line * self.units + unit) * self.p.columns + v * b.WIDTH)
