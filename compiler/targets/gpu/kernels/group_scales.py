"""Scales and offsets of short scale groups, which a lane has of its weight rows in registers, a span at a time.

They are loaded as they are stored, in as few words as there are, and taken apart where a group is scaled. So a scale
that several groups share, or a word that has the steps of four, is read once.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from llmc.compiler.dtypes import DTYPES
from llmc.compiler.targets.gpu.kernels.fragments import call
from llmc.compiler.targets.gpu.tensor_cores import SPAN, TensorLayer
from llmc.compiler.targets.reference.kernels.frame import Array, Expr, Frame, let
from llmc.compiler.targets.reference.kernels.matrix import Matrix
from llmc.quantize.formats.affine import MIDDLE

_WORD_BYTES = 4
_LOADS = (16, 8, 4)  # bytes that one load has
_BYTE_AS_FLOAT = float((1 << 23) + MIDDLE)  # what `llmc_byte` takes off


@dataclass(frozen=True)
class _Plane:
    """Entries beside the numbers. elements: of K that share one. count: in a row. first: of its words in registers."""

    name: str
    dtype: str
    elements: int
    count: int
    first: int

    @property
    def of_span(self) -> int:
        return max(1, SPAN // self.elements)

    @property
    def item_bytes(self) -> int:
        return DTYPES[self.dtype].item_bytes

    @property
    def words(self) -> int:
        return -(-self.of_span * self.item_bytes // _WORD_BYTES)

    def load(self, k: Frame, to: Array, at: int, row: Expr, span: Expr) -> None:
        """Loads the entries of a span of a row. at: of the row's words."""
        begin, size = let(row * self.count), self.of_span * self.item_bytes
        entry = let(T.truncdiv(span * SPAN, self.elements))
        if size % _WORD_BYTES == 0 and self.count % self.of_span == 0:
            self._load_words(k, to, at + self.first, let(begin + entry))
            return
        # The last span of a row may have fewer entries, and a row need not begin at whole words.
        per_word = _WORD_BYTES // self.item_bytes
        for word in range(self.words):
            found: Expr = T.uint32(0)
            for i in range(min(per_word, self.of_span)):
                place = let(begin + T.min(entry + (word * per_word + i), self.count - 1))
                stored = k.raw(self.name, place)
                bits = T.reinterpret("uint32", stored) if self.dtype == "f32" else T.Cast("uint32", stored)
                found = T.bitwise_or(found, T.shift_left(bits, T.uint32(8 * self.item_bytes * i)))
            to[at + self.first + word] = found

    def _load_words(self, k: Frame, to: Array, at: int, entry: Expr) -> None:
        left, done = self.of_span * self.item_bytes, 0
        while left:
            size = next(size for size in _LOADS if size <= left)
            place = let(entry + done // self.item_bytes)
            call(f"llmc_load{size}", to.address(at + done // _WORD_BYTES), k.address(self.name, place))
            left, done = left - size, done + size

    def value(self, words: Array, at: int, element: Expr) -> Expr:
        """The entry of an element of the span, as float32; of a byte, what it is above the middle."""
        entry = T.truncdiv(element, self.elements) if self.of_span > 1 else T.int32(0)
        per_word = _WORD_BYTES // self.item_bytes
        word = self._picked(words, at + self.first, T.truncdiv(entry, per_word))
        if self.dtype == "f32":
            return T.reinterpret("float32", word)
        within = T.truncmod(entry, per_word)
        if self.dtype == "f16":
            half = T.shift_right(word, T.Cast("uint32", within * 16))
            return T.call_pure_extern("float32", "llmc_low_f16", half)
        return T.call_pure_extern("float32", "llmc_byte", word, within, T.float32(_BYTE_AS_FLOAT))

    def _picked(self, words: Array, first: int, number: Expr) -> Expr:
        """One of the plane's words. Registers have no index, so all are looked at unless the number is constant."""
        found = words[first]
        for other in range(1, self.words):
            found = T.Select(number == other, words[first + other], found)
        return found


class GroupScales:
    """Of the short groups of a layer. words: of a row's span, in registers."""

    def __init__(self, layer: TensorLayer, matrix: Matrix) -> None:
        of_block = getattr(matrix.format, "block", matrix.format.group_size)
        self._planes: dict[str, _Plane] = {}
        self.words = 0
        for plane in matrix.planes:
            elements = matrix.format.group_size if plane.name in ("step", "shift") else of_block
            found = _Plane(plane.name, plane.dtype, elements, plane.count, self.words)
            self._planes[plane.name], self.words = found, self.words + found.words
        self._last = -(-layer.width // SPAN) - 1

    def load(self, k: Frame, to: Array, at: int, row: Expr, span: Expr) -> None:
        """Loads a span of a weight row, or the last one for those that there are not. at: its first word in `to`."""
        which = let(T.min(span, self._last))
        for plane in self._planes.values():
            plane.load(k, to, at, row, which)

    def scale(self, words: Array, at: int, element: Expr) -> Expr:
        """The scale of an element of a span, as float32."""
        return self._product(words, at, element, "scale", "step")

    def less(self, words: Array, at: int, element: Expr) -> Expr:
        """Minus the offset of an element of a span."""
        return -self._product(words, at, element, "offset", "shift")

    def _product(self, words: Array, at: int, element: Expr, of_block: str, of_group: str) -> Expr:
        found = self._planes[of_block].value(words, at, element)
        times = self._planes.get(of_group)
        return found if times is None else found * times.value(words, at, element)
