"""Rows of int8 activations: words of four numbers, the row's scale, and a sum per group of the weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import Param
from llmc.compiler.targets.reference.kernels.frame import Array, Cell, Expr, Frame, is_nan, let, when
from llmc.compiler.targets.reference.kernels.functions import nearest
from llmc.compiler.targets.reference.kernels.padding import number_bytes

_SMALLEST = 1e-36  # smaller magnitudes count as zero; 127 divided by this is finite


@dataclass(frozen=True)
class Int8Rows:
    """The layout of rows of `width` numbers. groups: number of sums."""

    width: int
    groups: int

    @property
    def number_words(self) -> int:
        return number_bytes(self.width, 8) // 4

    @property
    def words(self) -> int:
        """Words per row: whole units of 16 bytes, which GPUs copy at a time."""
        return -(-(self.number_words + 1 + self.groups) // 4) * 4

    def number(self, k: Frame, name: str, row: Expr, element: Expr) -> Expr:
        """An int8 number, as int32."""
        word = k.raw(name, row * self.words + T.truncdiv(element, 4))
        up = (T.int32(3) - T.truncmod(element, 4)) * 8
        return T.shift_right(T.shift_left(word, up), T.int32(24))

    def word(self, k: Frame, name: str, row: Expr, number: Expr) -> Expr:
        """Four int8 numbers, the first one in the low byte."""
        return k.raw(name, row * self.words + number)

    def scale(self, k: Frame, name: str, row: Expr) -> Expr:
        return T.reinterpret("float32", k.raw(name, row * self.words + self.number_words))


def int8_scales(largest: Expr) -> tuple[Expr, Expr]:
    """(scale, factor for the values) of a row with this largest magnitude."""
    scale = largest / T.float32(127.0)
    return scale, let(T.float32(127.0) / T.max(largest, T.float32(_SMALLEST)), "float32")


def int8_number(value: Expr) -> Expr:
    """The nearest number, as int32. value: already divided by the row's scale."""
    return let(T.Cast("int32", T.max(T.min(nearest(value), T.float32(127.0)), T.float32(-127.0))))


def write_int8_row(k: Frame, row: Expr, width: int, params: Mapping[str, Param], value: Callable[[Expr], Expr]) -> None:
    """Quantizes a row to the buffer `out`. value: of an element. params: group_size and sum_factor of the weight that
    reads it."""
    group_size = int(params["group_size"])
    size = width if group_size < 0 else group_size
    rows = Int8Rows(width, -(-width // size))
    values, largest = Array(width), Cell(T.float32(0.0))
    with T.serial(width) as i:
        values[i] = value(i)
        magnitude = let(T.abs(values[i]), "float32")
        with when(T.Or(magnitude > largest.get(), is_nan(magnitude))):
            largest.set(magnitude)
    scale, inverse = int8_scales(largest.get())
    start = let(row * rows.words)
    k.put_raw("out", T.reinterpret("int32", scale), start + rows.number_words)
    with T.serial(rows.number_words) as word:
        k.put_raw("out", T.int32(0), start + word)
    with T.serial(rows.groups) as group:
        k.put_raw("out", T.int32(0), start + (rows.number_words + 1) + group)
    with T.serial(width) as i:
        number = int8_number(values[i] * inverse)
        at = let(start + T.truncdiv(i, 4))
        byte = T.shift_left(T.bitwise_and(number, T.int32(255)), T.truncmod(i, 4) * 8)
        k.put_raw("out", T.bitwise_or(k.raw("out", at), byte), at)
        total = let(start + (rows.number_words + 1) + T.truncdiv(i, size))
        k.put_raw("out", k.raw("out", total) + number * int(params["sum_factor"]), total)
