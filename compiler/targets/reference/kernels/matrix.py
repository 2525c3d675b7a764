"""A quantized matrix as the reference target stores it: rows of numbers, and the planes beside them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.reference.kernels.frame import Expr, Frame, let
from llmc.compiler.targets.reference.kernels.padding import number_bytes, stored_bits
from llmc.quantize.formats.affine import MIDDLE
from llmc.quantize.formats.base import WeightFormat, groups_of
from llmc.quantize.formats.codes import E8M0
from llmc.quantize.formats.tables import TABLES


class _Known(NamedTuple):
    element: Expr
    number: Expr
    group: Expr


class Matrix(ABC):
    """[N, K] unsigned numbers. groups: per row. group_size: K if a row is one group."""

    def __init__(self, format: Any, width: int) -> None:
        base: WeightFormat = format
        self.format, self.width, self.bits = format, width, base.bits
        self.planes = base.planes(width)
        self.groups, self.scales = base.groups(width), base.scales(width)
        self.group_size = width if self.groups == 1 else base.group_size
        self._known: _Known | None = None

    @contextmanager
    def known(self, element: Expr, number: Expr, group: Expr) -> Iterator[None]:
        """Within, nothing is read or computed for the number and the group of this very element."""
        self._known = _Known(element, number, group)
        try:
            yield
        finally:
            self._known = None

    def operands(self) -> dict[str, str]:
        return {"weight": "u8", **{plane.name: plane.dtype for plane in self.planes}}

    def group(self, element: Expr) -> Expr:
        if self._known is not None and element is self._known.element:
            return self._known.group
        return T.truncdiv(element, self.group_size)

    def number(self, k: Frame, row: Expr, element: Expr) -> Expr:
        """The unsigned number of an element, as int32."""
        if self._known is not None and element is self._known.element:
            return self._known.number
        stride = number_bytes(self.width, self.bits)
        if stored_bits(self.bits) == 8:
            return T.Cast("int32", k.raw("weight", row * stride + element))
        byte = T.Cast("int32", k.raw("weight", row * stride + T.truncdiv(element, 2)))
        return T.bitwise_and(T.shift_right(byte, T.truncmod(element, 2) * 4), T.int32(15))

    def of_group(self, k: Frame, plane: str, row: Expr, element: Expr) -> Expr:
        """The entry of `plane` for an element's group."""
        return k.raw(plane, row * self.groups + self.group(element))

    def scale(self, k: Frame, row: Expr, group: Expr) -> Expr:
        return k.load("scale", row if self.scales == 1 else row * self.groups + group)

    @abstractmethod
    def float(self, k: Frame, row: Expr, element: Expr) -> Expr:
        """The number before scaling, as float32."""

    def value(self, k: Frame, row: Expr, element: Expr) -> Expr:
        """The value of an element."""
        return self.float(k, row, element) * self.scale(k, row, self.group(element))


class IntegerMatrix(Matrix):
    """A matrix in a format with integer sums."""

    @abstractmethod
    def whole(self, k: Frame, row: Expr, element: Expr) -> Expr:
        """The number before scaling, as int32."""

    @property
    @abstractmethod
    def fits_bytes(self) -> bool:
        """Whether each such number fits a signed byte."""

    @property
    def around_middle(self) -> bool:
        """Whether numbers are stored as bytes around 128."""
        return False

    def float(self, k: Frame, row: Expr, element: Expr) -> Expr:
        return T.Cast("float32", self.whole(k, row, element))


class Integers(IntegerMatrix):
    def whole(self, k: Frame, row: Expr, element: Expr) -> Expr:
        number = self.number(k, row, element)
        if self.format.asymmetric:
            return number - T.Cast("int32", self.of_group(k, "zero", row, element))
        return number - self.format.middle

    @property
    def fits_bytes(self) -> bool:
        return self.bits == 4 or not self.format.asymmetric

    @property
    def around_middle(self) -> bool:
        return self.bits == 8 and not self.format.asymmetric


class Steps(IntegerMatrix):
    def whole(self, k: Frame, row: Expr, element: Expr) -> Expr:
        byte = T.Cast("int32", self.of_group(k, "step", row, element))
        number = self.number(k, row, element) - T.shift_right(byte, T.int32(4))
        return number * T.bitwise_and(byte, T.int32(15))

    @property
    def fits_bytes(self) -> bool:
        return True  # as the format promises (`quantize/formats/steps.py`)


class Floats8(Matrix):
    """E4M3: sign, 4 exponent bits with bias 7, 3 mantissa bits."""

    def float(self, k: Frame, row: Expr, element: Expr) -> Expr:
        number = let(self.number(k, row, element))
        magnitude = T.bitwise_and(number, T.int32(127))
        normal = T.reinterpret("float32", T.shift_left(magnitude, T.int32(20)) + T.int32((127 - 7) << 23))
        small = T.Cast("float32", magnitude) * T.float32(2.0**-9)
        value = let(T.Select(magnitude < 8, small, normal), "float32")
        return T.Select(number < 128, value, -value)


def _of_table(table: str, number: Expr) -> Expr:
    value = T.float32(0.0)
    for code, of_code in enumerate(TABLES[table]):
        value = T.Select(number == code, T.float32(float(of_code)), value)
    return value


class Codes(Matrix):
    def float(self, k: Frame, row: Expr, element: Expr) -> Expr:
        return _of_table(self.format.table, let(self.number(k, row, element)))

    def scale(self, k: Frame, row: Expr, group: Expr) -> Expr:
        scale = super().scale(k, row, group)
        if self.format.scale_kind != E8M0:
            return scale
        power = let(T.Cast("int32", scale))
        # 2^-127 is subnormal in float32.
        bits = T.Select(power == 0, T.int32(1 << 22), T.shift_left(power, T.int32(23)))
        return T.reinterpret("float32", bits)


class Affine(Matrix):
    def float(self, k: Frame, row: Expr, element: Expr) -> Expr:
        number = self.number(k, row, element)
        if self.format.table:
            return _of_table(self.format.table, let(number))
        return T.Cast("float32", number - self.format.middle)

    def scale(self, k: Frame, row: Expr, group: Expr) -> Expr:
        return self._of_block(k, row, group, "scale", "step")

    def value(self, k: Frame, row: Expr, element: Expr) -> Expr:
        value = super().value(k, row, element)
        if not self.format.offsets:
            return value
        return value - self._of_block(k, row, self.group(element), "offset", "shift")

    def _of_block(self, k: Frame, row: Expr, group: Expr, of_block: str, of_group: str) -> Expr:
        """The block's entry times the group's entry."""
        blocks = groups_of(self.width, self.format.block)
        found = k.load(of_block, row * blocks + T.truncdiv(group, self.format.block // self.format.group_size))
        if not self.format.stepped:
            return found
        return found * T.Cast("float32", T.Cast("int32", k.raw(of_group, row * self.groups + group)) - MIDDLE)
