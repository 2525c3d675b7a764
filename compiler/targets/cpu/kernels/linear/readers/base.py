"""How the packed panels of a weight become operands of a micro-kernel: what all formats share.

A panel is its lines of K, each as words of all columns. A word of 16 columns is read at a time, and becomes operands of
the kind that a micro-kernel takes, ascending in K.
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
    """What the operands of a group depend on, by vectors of columns: zero points, say."""

    def __getitem__(self, v: int) -> b.Expr: ...


class Lines(Protocol):
    """Adds packed lines to the sums of a tile in a format's own way."""

    def start(self, tile: Tile, acc: b.Vectors) -> None:
        """The sums before the first line."""

    def add(self, tile: Tile, acc: b.Vectors, line0: b.Expr, line1: b.Expr) -> None:
        """Adds lines [line0, line1)."""


class Reader(ABC):
    """Reads a problem's weight as operands of a kind (`micro.base`). `bind` comes before all that emits code.

    units: operands of a line; line_words: what they are made of. kept: whether a word stays in a register once it is
    read. as_it_lies: whether an operand is a word in memory, so that blocks for many rows need no unpacking;
    unpacked_for_few: whether they pay for it even if few row tiles read them.
    """

    units_of: ClassVar[Mapping[str, int]]
    """Operands of a line, by the kinds that they can be."""
    line_words: ClassVar[int] = 1
    kept: ClassVar[bool] = False
    as_it_lies = False
    unpacked_for_few = False

    def __init__(self, p: Problem, operand: str) -> None:
        self.p, self.operand, self.units, self.dtype = p, operand, self.units_of[operand], DTYPE[operand]
        # What lies in memory: line_vectors of a line, at most.
        self.panel_words = p.lines * self.line_words
        self.line_vectors = self.line_words * p.vectors
        self.line_bytes = 4 * self.line_words * p.columns

    @staticmethod
    def helpers(target: Target) -> str:
        """The IR text that it needs beside `ir.vector`'s."""
        return ""

    def bind(self, k: b.Kernel) -> None:
        """Takes the buffers of the kernel that is being written."""
        self.w = k["w"]

    def position(self, panel: b.Expr, line: b.Expr) -> b.Expr:
        """Where a line of a panel starts."""
        return (panel * self.panel_words + line * self.line_words) * self.p.columns

    def share(self, panel: b.Expr, line: b.Expr) -> b.Expr:
        """Where `line_vectors` of a panel start that are fetched with a line: with all lines, the whole panel."""
        return self.position(panel, line)

    def word_of(self, unit: int) -> int:
        """The word of a line that operand `unit` is in."""
        return unit * self.line_words // self.units

    def word(self, panel: b.Expr, line: b.Expr, v: int, i: int) -> b.Expr:
        """Word i of a line of 16 columns."""
        word = self.w[T.ramp(self.position(panel, line) + (i * self.p.columns + v * b.WIDTH), 1, b.WIDTH)]
        return b.kept(word, "int32") if self.kept else word

    def fetch(self, position: b.Expr, level: int = 1) -> None:
        """Brings a vector of the weight into the cache of a level."""
        b.do("prefetch_l2" if level == 2 else "prefetch", b.at(self.w, position))

    fetch_group: Callable[[b.Expr, b.Expr], None] | None = None
    """Brings what a group of numbers of a panel has beside them into the cache, if few rows read it line by line."""

    @abstractmethod
    def operand_of(self, word: b.Expr, unit: int, of_group: OfGroup | None, v: int) -> b.Expr:
        """Operand `unit` of a line, from the word that it is in; of_group: what `group_of` gave, v: a vector of it."""

    def group_of(self, panels: Sequence[b.Expr], group: b.Expr) -> OfGroup | None:
        """What `operand_of` needs of a group of numbers of some panels, if anything, until this is called again."""
        return None

    def lines(self, micro: MicroKernel) -> Lines | None:
        """How packed lines are multiplied, if not an operand at a time."""
        return None

    # ---- of sums ----------------------------------------------------------------------------------------------------

    def scales(self, panels: Sequence[b.Expr], group: b.Expr) -> b.Vectors | None:
        """What the sums of a group are multiplied by."""
        return None

    def zeros_of_sums(self, panels: Sequence[b.Expr], group: b.Expr) -> b.Vectors | None:
        """Zero points that the sums of a group lack."""
        return None

    def offsets(self, panels: Sequence[b.Expr], group: b.Expr) -> b.Vectors | None:
        """What the sum of the activations of a group (`MicroKernel.sum_of_row`) is multiplied by, and sums lack."""
        return None

    @property
    def middle(self) -> int:
        """What numbers are too large by in pairs of s16; 0 where a zero point is stored."""
        return 0

    @property
    def factor(self) -> float | None:
        """What the sums of a row are multiplied by in the end."""
        return None

    # ---- unpacking --------------------------------------------------------------------------------------------------

    @property
    def by_group(self) -> bool:
        """Whether `group_of` gives anything."""
        return False

    def unpack(self, wide: b.Scratch, panel: b.Expr, line0: b.Expr, length: b.Expr) -> None:
        """Operands of lines [line0, line0 + length) of a panel to `wide`."""
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
