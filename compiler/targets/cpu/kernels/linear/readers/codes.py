"""Weights of 4-bit codes, looked up in the table of their format; scales are floats or powers of two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.ir import fixed, lookup
from llmc.compiler.targets.cpu.kernels.linear.micro.base import B16X2, F32, S16X2
from llmc.compiler.targets.cpu.kernels.linear.problem import LINE
from llmc.compiler.targets.cpu.kernels.linear.readers.nibbles import FourBits
from llmc.compiler.targets.cpu.kernels.linear.readers.tables import is_bf16
from llmc.compiler.targets.cpu.target import Target
from llmc.quantize.formats.codes import Codes
from llmc.quantize.formats.tables import TABLES

_LEAST = 1 << 22
"""2⁻¹²⁷, which no float exponent represents."""


class Looked(FourBits):
    units_of: ClassVar = {F32: LINE}
    look_up = "lookup"

    @staticmethod
    def helpers(target: Target) -> str:
        return lookup.lookup(target)

    def table_values(self) -> Sequence[float]:
        assert isinstance(self.p.format, Codes)
        return [float(value) for value in self.p.format.values]

    def scale(self, at: b.Expr) -> b.Expr:
        if self.p.planes["scale"].dtype != "u8":
            return super().scale(at)
        power = T.Cast(f"int32x{b.WIDTH}", self.k["scale"][T.ramp(at, 1, b.WIDTH)])
        bits = T.shift_left(power, T.broadcast(T.int32(23), b.WIDTH))
        return T.reinterpret(f"float32x{b.WIDTH}", T.max(bits, T.broadcast(T.int32(_LEAST), b.WIDTH)))


class Exact(Looked):
    """Codes whose numbers are exact in bf16."""

    units_of: ClassVar = {B16X2: LINE // 2, F32: LINE}


class HalfUnits(Exact):
    """e2m1, whose floats are whole numbers of halves: a byte counts the halves above the lowest value."""

    units_of: ClassVar = {S16X2: LINE // 2, B16X2: LINE // 2, F32: LINE}
    _halves: ClassVar[Sequence[int]] = [int(2 * value) for value in TABLES["e2m1"]]

    @classmethod
    def helpers(cls, target: Target) -> str:
        bytes_of = fixed.table([half - min(cls._halves) for half in cls._halves]) if target.lanes == 8 else ""
        return lookup.lookup(target) + bytes_of

    @property
    def middle(self) -> int:
        return -min(self._halves)

    @property
    def factor(self) -> float | None:
        return 0.5 if self.operand == S16X2 else None

    def pair_of(self, word: b.Expr, half: int, odd: int) -> b.Expr:
        found = b.kept(T.call_extern("int32x16", "llmc_byte_table", self.bytes_of(word, half)), "int32")
        return T.call_extern("int32x16", f"llmc_bytes_{odd}", found)


def reader(format: Codes) -> type[Looked]:
    """The reader of a table of codes."""
    if format.table == "e2m1":
        return HalfUnits
    return Exact if is_bf16(format.values.tolist()) else Looked
