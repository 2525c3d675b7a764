"""Weights of 4-bit codes: looked up in the table of their format, with scales of floats or powers of two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.ir import lookup
from llmc.compiler.targets.cpu.kernels.linear.micro.base import F32
from llmc.compiler.targets.cpu.kernels.linear.problem import LINE
from llmc.compiler.targets.cpu.kernels.linear.readers.nibbles import FourBits
from llmc.compiler.targets.cpu.target import Target
from llmc.quantize.formats.codes import Codes

_LEAST = 1 << 22
"""2⁻¹²⁷, which has no exponent of its own."""


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
        if self.p.planes["scale"].dtype == "f32":
            return super().scale(at)
        power = T.Cast(f"int32x{b.WIDTH}", self.k["scale"][T.ramp(at, 1, b.WIDTH)])
        bits = T.shift_left(power, T.broadcast(T.int32(23), b.WIDTH))
        return T.reinterpret(f"float32x{b.WIDTH}", T.max(bits, T.broadcast(T.int32(_LEAST), b.WIDTH)))
