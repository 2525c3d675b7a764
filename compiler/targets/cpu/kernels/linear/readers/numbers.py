"""Weights of unsigned numbers with one scale per group along K, and possibly a zero point of one byte.

A line has 8 elements of K. For integer sums, a line's bytes are read as four numbers of one half.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.ir import int8
from llmc.compiler.targets.cpu.kernels.linear.micro.base import B16X2, F32, S16X2, U8X4
from llmc.compiler.targets.cpu.kernels.linear.problem import LINE, Problem
from llmc.compiler.targets.cpu.kernels.linear.readers.base import OfGroup, Reader
from llmc.compiler.targets.cpu.target import Target


class Numbers(Reader):
    """Common to numbers of all widths.

    most_streams: most panels read at once. They are read in turn, in blocks of about stream_bytes, prefetched
    stream_vectors at a time into the cache of stream_level.
    """

    units_of: ClassVar[Mapping[str, int]] = {U8X4: 2, F32: LINE}
    kept = True
    most_streams = 6  # a core reads memory faster from several places at once
    stream_bytes: ClassVar[int] = 3072
    stream_vectors, stream_level = 1, 2

    @property
    def streams(self) -> int:
        """Panels read at once. One if numbers become bf16: the sums of more panels would not stay in registers."""
        return 1 if self.operand == B16X2 else self.most_streams

    def bind(self, k: b.Kernel) -> None:
        super().bind(k)
        self.k = k
        self.bytes_of_group: b.Expr = next((k[name] for name in self.p.planes if name != "scale"), None)

    @property
    def by_group(self) -> bool:
        return self.p.asymmetric and self.operand == F32

    def group_of(self, panels: Sequence[b.Expr], group: b.Expr) -> OfGroup | None:
        return self.zeros(panels, group) if self.by_group else None

    def zeros_of_sums(self, panels: Sequence[b.Expr], group: b.Expr) -> b.Vectors | None:
        return self.zeros(panels, group) if self.p.asymmetric and not self.by_group else None

    def operand_of(self, word: b.Expr, unit: int, of_group: OfGroup | None, v: int) -> b.Expr:
        if self.operand == U8X4:
            return self.bytes_of(word, unit)
        if self.operand == S16X2:
            return self.pair_of(word, *divmod(unit, 2))
        if self.operand == B16X2:
            return self.bf16_of(word, *divmod(unit, 2))
        value = self.element(word, unit)
        return value if of_group is None else b.call("sub", value, of_group[v])

    def bytes_of(self, word: b.Expr, half: int) -> b.Expr:
        """Four numbers, half of a line, as unsigned bytes, for a format summed as integers. word: the word that has
        them."""
        raise NotImplementedError

    def pair_of(self, word: b.Expr, half: int, odd: int) -> b.Expr:
        """The even or the odd numbers of a half of a line, for a format whose `units_of` contains pairs."""
        return T.call_extern("int32x16", f"llmc_bytes_{odd}", self.bytes_of(word, half))

    def bf16_of(self, word: b.Expr, half: int, odd: int) -> b.Expr:
        """The even or the odd numbers of a half of a line as bf16, offset like `element`."""
        low, high = (self.element(word, 4 * half + odd + place) for place in (0, 2))
        return T.call_extern("int32x16", "llmc_bf16_pair", low, high)

    @abstractmethod
    def element(self, word: b.Expr, place: int) -> b.Expr:
        """Number `place` of a line as a float, complete except for a stored zero point. word: the word that has it."""

    # ---- what lies beside numbers -----------------------------------------------------------------------------------

    def place(self, panel: b.Expr, groups: int, group: b.Expr, v: int) -> b.Expr:
        """Index of vector v of a group's columns in a plane. groups: groups per panel."""
        return (panel * groups + group) * self.p.columns + v * b.WIDTH

    def of_columns(
        self, panels: Sequence[b.Expr], value: Callable[[b.Expr, int], b.Expr], dtype: str = "float32"
    ) -> b.Vectors:
        """`value` of each panel and each vector of its columns."""
        found = b.Vectors(len(panels) * self.p.vectors, dtype)
        for i, panel in enumerate(panels):
            for v in range(self.p.vectors):
                found[i * self.p.vectors + v] = value(panel, v)
        return found

    def zeros(self, panels: Sequence[b.Expr], group: b.Expr) -> b.Vectors:
        """Zero points of a group of some panels, in the number format of the sums or of `element`."""
        p = self.p
        floats = self.operand in (F32, B16X2)
        dtype = "float32" if floats else self.dtype

        def stored(panel: b.Expr, v: int) -> b.Expr:
            at = self.place(panel, p.number_groups, group, v)
            value = T.Cast(f"{dtype}x{b.WIDTH}", self.bytes_of_group[T.ramp(at, 1, b.WIDTH)])
            return self.zero(value) if floats else value

        return self.of_columns(panels, stored, dtype)

    def zero(self, value: b.Expr) -> b.Expr:
        """A stored zero point in the number format of `element`."""
        return value

    def scales(self, panels: Sequence[b.Expr], group: b.Expr) -> b.Vectors:
        return self.of_columns(panels, lambda panel, v: self.scale(self.place(panel, self.p.scale_groups, group, v)))

    def scale(self, at: b.Expr) -> b.Expr:
        """The scales of 16 columns from `at` on."""
        return self.floats("scale", at)

    def floats(self, plane: str, at: b.Expr) -> b.Expr:
        """Values of a plane of floats for 16 columns from `at` on."""
        return b.load_vector(self.k[plane], at, dtype=self.p.planes[plane].dtype)


class EightBits(Numbers):
    """Two words per line. As floats, numbers are 2²⁴ times too large; this is exact and corrected at the end."""

    units_of: ClassVar[Mapping[str, int]] = {U8X4: 2, S16X2: LINE // 2, B16X2: LINE // 2, F32: LINE}
    line_words = 2
    stream_bytes = 1536  # in L1, together with the sums, when they are read

    def __init__(self, p: Problem, operand: str) -> None:
        super().__init__(p, operand)
        self.as_it_lies, self.unpacked_for_few = operand == U8X4, operand in (F32, B16X2)
        self.stream_vectors, self.stream_level = self.line_vectors, 1
        if operand != U8X4:
            self.most_streams = 4  # bytes being converted take registers

    @staticmethod
    def helpers(target: Target) -> str:
        return int8.bytes_to_floats()

    def word(self, panel: b.Expr, line: b.Expr, v: int, i: int) -> b.Expr:
        """Word i of a line; of signed bytes if they become floats."""
        word = super().word(panel, line, v, i)
        if self.operand in (U8X4, S16X2):
            return word
        return b.kept(T.call_extern("int32x16", "llmc_signed_bytes", word), "int32")

    def bytes_of(self, word: b.Expr, half: int) -> b.Expr:
        return word

    def element(self, word: b.Expr, place: int) -> b.Expr:
        return b.call(f"byte_{place % 4}", word)

    def zero(self, value: b.Expr) -> b.Expr:
        return b.call("mul", b.call("sub", value, b.splat(128.0)), b.splat(2.0**24))

    @property
    def middle(self) -> int:
        return 0 if self.p.asymmetric else 128

    @property
    def factor(self) -> float | None:
        return 2.0**-24 if self.operand in (F32, B16X2) else None
