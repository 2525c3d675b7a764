"""Neighbouring elements of a row of x, which a linear layer multiplies by as many of a weight row."""

from __future__ import annotations

from abc import ABC, abstractmethod

from tvm.script.ir_builder import tirx as T

from llmc.compiler.dtypes import F32, FLOATS
from llmc.compiler.targets.gpu.kernels.words import load_words, part_of
from llmc.compiler.targets.reference.kernels.frame import Array, Expr, Frame, let, widened
from llmc.compiler.targets.reference.kernels.rows_int8 import Int8Rows

_WIDEST = 16
_MOST_ELEMENTS = 8


class XReads(ABC):
    """count: elements of a read, which divides those of a weight's read. pitch: elements of the buffer from row to
    row."""

    count: int
    pitch: int

    @abstractmethod
    def read(self, k: Frame, start: Expr, first: Expr) -> Array | None:
        """Asks for elements from `first` on. start: of the row, in elements of the buffer. None: element by element."""

    @abstractmethod
    def element(self, k: Frame, start: Expr, first: Expr, words: Array | None, i: Expr) -> Expr:
        """Element i of a read, as it is multiplied."""


class FloatRows(XReads):
    """Rows of floats."""

    def __init__(self, dtype: str, pitch: int, count: int) -> None:
        """count: elements of a weight's read, a power of two."""
        self.count, self.pitch, self._dtype = min(count, _MOST_ELEMENTS), pitch, dtype
        self._item_bytes = FLOATS[dtype].item_bytes
        sizes = (self._item_bytes * pitch, self._item_bytes * self.count)
        self._bytes = next((size for size in (_WIDEST, 8, 4) if not any(of % size for of in sizes)), 0)

    def read(self, k: Frame, start: Expr, first: Expr) -> Array | None:
        if not self._bytes:
            return None
        return load_words(k, "x", self._bytes, self.count * self._item_bytes, let(start + first), self._item_bytes)

    def element(self, k: Frame, start: Expr, first: Expr, words: Array | None, i: Expr) -> Expr:
        if words is None:
            return let(k.load("x", start + first + i), "float32")
        if self._dtype == F32.name:
            return let(T.reinterpret("float32", words[i]), "float32")
        return let(widened(self._dtype, let(part_of(words, i, 16))), "float32")


class WordRows(XReads):
    """Rows of int8 numbers, by fours. Elements are words."""

    def __init__(self, rows: Int8Rows, count: int) -> None:
        """count: a power of two, at most 4."""
        self.count, self.pitch = count, rows.words

    def read(self, k: Frame, start: Expr, first: Expr) -> Array | None:
        return load_words(k, "x", 4 * self.count, 4 * self.count, let(start + first), 4)

    def element(self, k: Frame, start: Expr, first: Expr, words: Array | None, i: Expr) -> Expr:
        assert words is not None
        return let(T.Cast("int32", words[i]))


class ByteRows(XReads):
    """Rows of int8 numbers, one by one."""

    def __init__(self, rows: Int8Rows, count: int) -> None:
        self.count, self.pitch = min(count, _MOST_ELEMENTS), rows.words

    def read(self, k: Frame, start: Expr, first: Expr) -> Array | None:
        return None

    def element(self, k: Frame, start: Expr, first: Expr, words: Array | None, i: Expr) -> Expr:
        number = let(first + i)
        word = let(k.raw("x", start + T.truncdiv(number, 4)))
        return let(T.shift_right(T.shift_left(word, (T.int32(3) - T.truncmod(number, 4)) * 8), T.int32(24)))
