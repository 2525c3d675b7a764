"""Neighbouring elements of a weight row, which an item reads 4, 8 or 16 bytes at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from llmc.compiler.dtypes import F32, FLOATS
from llmc.compiler.targets.gpu.kernels.words import load_words, part_of
from llmc.compiler.targets.reference.kernels.frame import Array, Cell, Expr, Frame, let, row_width, widened
from llmc.compiler.targets.reference.kernels.matrix import IntegerMatrix, Matrix
from llmc.compiler.targets.reference.kernels.padding import number_bytes, stored_bits

_MOST_BYTES = 16
_MOST_NUMBERS = 16
"""Of a read, so that kernels stay short."""
_MIDDLES = -0x7F7F7F80  # of four unsigned bytes, the first bit of each


@dataclass(frozen=True)
class Read:
    """A read of a row, from element `first` on. words: of it; None where elements are read one by one."""

    row: Expr
    first: Expr
    words: Array | None
    group: Expr | None = None
    """The group of a quantized weight that all elements are of."""


class WeightReads(ABC):
    """count: elements of a read, which divides a row's and those of a scale. bytes: of a read."""

    count: int
    bytes: int

    @abstractmethod
    def read(self, k: Frame, row: Expr, first: Expr) -> Read:
        """Asks for the read that begins with element `first`."""

    @abstractmethod
    def element(self, k: Frame, read: Read, i: Expr) -> Expr:
        """Element i of a read, as it is multiplied."""


class FloatReads(WeightReads):
    """Unquantized weights."""

    def __init__(self, dtype: str, width: int) -> None:
        self._dtype, self._pitch = dtype, row_width(width, dtype)
        count = _MOST_BYTES // FLOATS[dtype].item_bytes
        self.count = count if width % count == 0 else 1
        self.bytes = self.count * FLOATS[dtype].item_bytes

    def read(self, k: Frame, row: Expr, first: Expr) -> Read:
        if self.count == 1:
            return Read(row, first, None)
        at = let(row * self._pitch + first)
        return Read(row, first, load_words(k, "weight", _MOST_BYTES, _MOST_BYTES, at, FLOATS[self._dtype].item_bytes))

    def element(self, k: Frame, read: Read, i: Expr) -> Expr:
        if read.words is None:
            return let(k.load("weight", read.row * self._pitch + read.first), "float32")
        if self._dtype == F32.name:
            return let(T.reinterpret("float32", read.words[i]), "float32")
        return let(widened(self._dtype, let(part_of(read.words, i, 16))), "float32")


class NumberReads(WeightReads):
    """Quantized weights. value: of an element. dtype: of values. length: elements of a scale, at most the row's."""

    def __init__(self, matrix: Matrix, value: Callable[[Frame, Expr, Expr], Expr], dtype: str, length: int) -> None:
        self._matrix, self._value, self._dtype = matrix, value, dtype
        self._bits = stored_bits(matrix.bits)
        self._stride = number_bytes(matrix.width, matrix.bits)
        wide = next((size for size in (16, 8, 4) if self._fits(size, length)), 0)
        self.count, self.bytes = max(1, wide * 8 // self._bits), max(1, wide)

    def _fits(self, size: int, length: int) -> bool:
        count = size * 8 // self._bits
        parts = (self._matrix.width, self._matrix.group_size, length)
        return count <= _MOST_NUMBERS and self._stride % size == 0 and not any(part % count for part in parts)

    def read(self, k: Frame, row: Expr, first: Expr) -> Read:
        words = None
        if self.count > 1:
            at = let(row * self._stride + T.truncdiv(first * self._bits, 8))
            words = load_words(k, "weight", self.bytes, self.bytes, at, 1)
        return Read(row, first, words, let(self._matrix.group(first)))

    def element(self, k: Frame, read: Read, i: Expr) -> Expr:
        place = let(read.first + i)
        if read.words is None:
            return let(self._value(k, read.row, place), self._dtype)
        with self._matrix.known(place, let(part_of(read.words, i, self._bits)), read.group):
            return let(self._value(k, read.row, place), self._dtype)


class WordReads(WeightReads):
    """Quantized weights as words of four signed bytes, the first one in the low byte. Elements are words."""

    def __init__(self, matrix: IntegerMatrix, length: int) -> None:
        """length: numbers of a scale."""
        self._matrix, self._numbers = matrix, NumberReads(matrix, matrix.whole, "int32", length)
        self.count, self.bytes = max(1, self._numbers.count // 4), max(4, self._numbers.bytes)

    def read(self, k: Frame, row: Expr, first: Expr) -> Read:
        return self._numbers.read(k, row, let(first * 4))

    def element(self, k: Frame, read: Read, i: Expr) -> Expr:
        if read.words is not None and self._matrix.around_middle:
            return let(T.bitwise_xor(T.Cast("int32", read.words[i]), T.int32(_MIDDLES)))
        word = Cell(T.int32(0), "int32")
        for byte in range(4):
            number = T.bitwise_and(self._numbers.element(k, read, let(i * 4 + byte)), T.int32(255))
            word.set(T.bitwise_or(word.get(), T.shift_left(number, T.int32(8 * byte))))
        return word.get()
