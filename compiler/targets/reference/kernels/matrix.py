"""A quantized matrix as the reference target stores it: rows of numbers, scales and what its format has of groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import Param
from llmc.compiler.targets.reference.kernels.frame import Expr, Frame
from llmc.compiler.targets.reference.kernels.padding import number_bytes


@dataclass(frozen=True)
class QuantizedMatrix:
    """[N, K] in unsigned numbers. groups: of a row; group_size: K where the whole row is one."""

    width: int
    bits: int
    group_size: int
    asymmetric: bool
    steps: bool

    @classmethod
    def of(cls, p: Mapping[str, Param], width: int) -> QuantizedMatrix:
        size = int(p["group_size"])
        return cls(width, int(p["bits"]), width if size < 0 else size, bool(p["asymmetric"]), bool(p["steps"]))

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def groups(self) -> int:
        return -(-self.width // self.group_size)

    @property
    def scales(self) -> int:
        return 1 if self.steps else self.groups

    @property
    def of_group(self) -> str:
        """The operand with a byte for each group, or nothing."""
        return "step" if self.steps else "zero" if self.asymmetric else ""

    def operands(self) -> dict[str, str]:
        return {"weight": "u8", "scale": "f32", **({self.of_group: "u8"} if self.of_group else {})}

    def group(self, element: Expr) -> Expr:
        return T.truncdiv(element, self.group_size)

    def number(self, k: Frame, row: Expr, element: Expr) -> Expr:
        """The unsigned number of an element, as int32."""
        stride = number_bytes(self.width, self.bits)
        if self.bits == 8:
            return T.Cast("int32", k.raw("weight", row * stride + element))
        byte = T.Cast("int32", k.raw("weight", row * stride + T.truncdiv(element, 2)))
        return T.bitwise_and(T.shift_right(byte, T.truncmod(element, 2) * 4), T.int32(15))

    def whole(self, k: Frame, row: Expr, element: Expr) -> Expr:
        """(number − zero), times the step where there are steps: what the scale multiplies, as int32."""
        number, at = self.number(k, row, element), row * self.groups + self.group(element)
        if self.steps:
            byte = T.Cast("int32", k.raw("step", at))
            return (number - T.shift_right(byte, T.int32(4))) * T.bitwise_and(byte, T.int32(15))
        if self.asymmetric:
            return number - T.Cast("int32", k.raw("zero", at))
        return number - self.middle

    def scale(self, k: Frame, row: Expr, group: Expr) -> Expr:
        return k.raw("scale", row if self.scales == 1 else row * self.groups + group)
