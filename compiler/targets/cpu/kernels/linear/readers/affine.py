"""Weights whose groups share the scales and offsets of blocks (`quantize/formats/affine.py`).

Without offsets, the sum of a group is a sum of numbers, whole or from a table, and is multiplied by step · scale. With
offsets, each number becomes a value by one fma before it is multiplied; sums are then merged as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.ir import lookup
from llmc.compiler.targets.cpu.kernels.linear.micro.base import B16X2, F32, S16X2
from llmc.compiler.targets.cpu.kernels.linear.problem import LINE, Problem
from llmc.compiler.targets.cpu.kernels.linear.readers.base import OfGroup
from llmc.compiler.targets.cpu.kernels.linear.readers.fives import FiveBits
from llmc.compiler.targets.cpu.kernels.linear.readers.nibbles import FourBits
from llmc.compiler.targets.cpu.kernels.linear.readers.numbers import EightBits, Numbers
from llmc.compiler.targets.cpu.kernels.linear.readers.sixes import SixBits
from llmc.compiler.targets.cpu.kernels.linear.readers.tables import is_bf16
from llmc.compiler.targets.cpu.target import Target
from llmc.quantize.formats.affine import MIDDLE, OFFSET, SHIFT, STEP, Affine
from llmc.quantize.formats.base import SCALE
from llmc.quantize.formats.tables import TABLES


@dataclass(frozen=True)
class _ValuesOfGroup:
    """By vectors of columns: value = number · scale + negated."""

    scale: b.Vectors
    negated: b.Vectors

    def __getitem__(self, v: int) -> b.Expr:
        return self.scale[v]


class _OfBlocks(Numbers):
    """Common to numbers of all widths and to codes."""

    units_of: ClassVar[Mapping[str, int]] = {S16X2: LINE // 2, B16X2: LINE // 2, F32: LINE}

    def __init__(self, p: Problem, operand: str) -> None:
        super().__init__(p, operand)
        assert isinstance(p.format, Affine)
        self.affine = p.format
        self.number_blocks = p.planes[SCALE].count
        if self.affine.offsets:
            self.most_streams = 3  # scales and offsets of their groups also take registers

    @property
    def middle(self) -> int:
        return self.affine.middle

    @property
    def by_group(self) -> bool:
        return self.affine.offsets and self.operand == F32

    def group_of(self, panels: Sequence[b.Expr], group: b.Expr) -> OfGroup | None:
        if not self.by_group:
            return None
        scale = self._of_blocks(panels, group, SCALE, STEP, 1.0)
        return _ValuesOfGroup(scale, self._of_blocks(panels, group, OFFSET, SHIFT, -1.0 / (self.factor or 1.0)))

    def operand_of(self, word: b.Expr, unit: int, of_group: OfGroup | None, v: int) -> b.Expr:
        if of_group is None:
            return super().operand_of(word, unit, of_group, v)
        value = self.element(word, unit)
        assert isinstance(of_group, _ValuesOfGroup)
        return b.call("fma", value, of_group.scale[v], of_group.negated[v])

    def scales(self, panels: Sequence[b.Expr], group: b.Expr) -> b.Vectors:
        if not self.by_group:
            return self._of_blocks(panels, group, SCALE, STEP, 1.0)
        return self.of_columns(panels, lambda panel, v: b.splat(1.0))

    def offsets(self, panels: Sequence[b.Expr], group: b.Expr) -> b.Vectors | None:
        if self.by_group or not self.affine.offsets:
            return None
        # The factor in `MicroKernel.sum_of_row`, or, if the sums lack it, the factor still to apply.
        less = (self.factor or 1.0) if self.operand == B16X2 else float(self.middle or 1)
        return self._of_blocks(panels, group, OFFSET, SHIFT, 1.0 / less)

    def _of_blocks(
        self, panels: Sequence[b.Expr], group: b.Expr, of_block: str, of_group: str, times: float
    ) -> b.Vectors:
        """`of_block` of the group's block, times `of_group` of the group if the format has steps, times `times`.

        For each vector of columns.
        """
        affine = self.affine
        block = T.truncdiv(group, affine.block // affine.group_size)

        def stored(panel: b.Expr, v: int) -> b.Expr:
            value = self.floats(of_block, self.place(panel, self.number_blocks, block, v))
            if times != 1.0:
                value = b.call("mul", value, b.splat(times))
            if affine.stepped:
                at = self.place(panel, self.p.number_groups, group, v)
                step = T.Cast(f"float32x{b.WIDTH}", self.k[of_group][T.ramp(at, 1, b.WIDTH)])
                value = b.call("mul", value, b.call("sub", step, b.splat(float(MIDDLE))))
            return value

        return self.of_columns(panels, stored)


class AffineBytes(_OfBlocks, EightBits):
    """Numbers minus 128."""


class AffineNibbles(_OfBlocks, FourBits):
    """Numbers minus their middle, from the table of `FourBits`."""


class AffineFives(_OfBlocks, FiveBits):
    """Numbers minus their middle, from the table of `FiveBits`."""


class AffineSixes(_OfBlocks, SixBits):
    """Numbers minus their middle; as bf16, from the table of `SixBits`."""


class AffineCodes(_OfBlocks, FourBits):
    """Codes with a table of their own."""

    units_of: ClassVar = {F32: LINE}
    look_up = "lookup"

    @staticmethod
    def helpers(target: Target) -> str:
        return lookup.lookup(target)

    def table_values(self) -> Sequence[float]:
        return [float(value) for value in TABLES[self.affine.table]]


class AffineExactCodes(AffineCodes):
    """Codes whose table values are exact in bf16."""

    units_of: ClassVar = {B16X2: LINE // 2, F32: LINE}


def reader(format: Affine) -> type[Numbers] | None:
    """The reader of a format; None if it has none."""
    if format.table:
        return AffineExactCodes if is_bf16(TABLES[format.table].tolist()) else AffineCodes
    return {8: AffineBytes, 6: AffineSixes, 5: AffineFives, 4: AffineNibbles}.get(format.bits)
