"""rms_norm and quantize_rows: a group works on a row, which lies in its items' registers, and a tree adds what they
have."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec, Param
from llmc.compiler.targets.gpu.kernels.fma import fma
from llmc.compiler.targets.gpu.kernels.fold import Fold, add, largest
from llmc.compiler.targets.gpu.kernels.groups import Shared, await_earlier, calling, spread, sync
from llmc.compiler.targets.gpu.kernels.strips import Kept, Strip
from llmc.compiler.targets.reference.kernels.frame import Cell, Expr, Frame, is_nan, let, row_width, when
from llmc.compiler.targets.reference.kernels.rows import write_activation
from llmc.compiler.targets.reference.kernels.rows_int8 import Int8Rows, int8_number, int8_scales

_WORD = 4  # int8 numbers
_MOST_WORDS = 4096  # of a row whose sums by word lie in shared memory
Element = Callable[[Expr, Expr], Expr]
"""The number of an element, by its place in the item's strip and its index in the row."""


def root_factor(squares: Expr, width: int, eps: float) -> Expr:
    """1 / sqrt(mean square + eps), by which a norm multiplies. squares: the sum of squares of `width` numbers."""
    mean = squares / T.float32(width)
    return let(T.float32(1.0) / T.sqrt(mean + T.float32(eps)), "float32")


def rms_norm(spec: KernelSpec) -> tirx.PrimFunc:
    p = spec.as_dict()
    dim, act = int(p["dim"]), str(p["act_dtype"])
    with Frame(spec.symbol(), {"x": "f32", "weight": "f32", "out": act}) as k:
        write = _Int8Row(k, dim, p) if act == "i8" else None
        strip = Strip(k, dim) if write is None else write.strip
        squares_of = Fold(k, add)
        weight = Kept(strip, lambda i: k.raw("weight", i))
        await_earlier()
        with calling(k).share_groups(k.scalar(int(p["rows"]))) as row:
            x = Kept(strip, lambda i: k.raw("x", row * dim + i))
            squares = Cell(T.float32(0.0))
            with strip.each() as (place, i):
                number = let(x.get(place, i), "float32")
                squares.set(fma(number, number, squares.get()))
            factor = root_factor(squares_of(squares.get()), dim, float(p["eps"]))

            def value(place: Expr, i: Expr) -> Expr:
                return x.get(place, i) * factor * weight.get(place, i)

            def again(i: Expr) -> Expr:
                return k.raw("x", row * dim + i) * factor * k.raw("weight", i)

            if write is not None:
                write(row, value, again)
            else:
                with strip.each() as (place, i):
                    write_activation(k, row, dim, act, i, value(place, i))
    return k.function()


def quantize_rows(spec: KernelSpec) -> tirx.PrimFunc:
    p = spec.as_dict()
    dim, act = int(p["dim"]), str(p["act_dtype"])
    stride, of_experts = row_width(dim, act), "experts" in p
    index = {"index": "i32"} if of_experts else {}
    with Frame(spec.symbol(), {"x": act, **index, "out": "i8"}) as k:
        rows = let(k.raw("index", T.int32(0))) if of_experts else k.scalar(int(p["rows"]))
        write = _Int8Row(k, dim, p)
        with calling(k).share_groups(rows) as row:

            def read(i: Expr) -> Expr:
                return let(k.load("x", row * stride + i), "float32")

            write(row, Kept(write.strip, read).get, read)
    return k.function()


class _Int8Row:
    """Quantizes rows of `width` numbers to the buffer `out`. params: group_size and sum_factor of the weight that reads
    them. strip: a word of numbers is of one item."""

    def __init__(self, k: Frame, width: int, params: Mapping[str, Param]) -> None:
        self._k, self._width, self._factor = k, width, int(params["sum_factor"])
        group_size = int(params["group_size"])
        self._size = width if group_size < 0 else group_size
        self._rows = Int8Rows(width, -(-width // self._size))
        self.strip = Strip(k, width, _WORD, self._rows.number_words)
        self._largest = Fold(k, largest)
        self._sum = Fold(k, add, "int32") if self._rows.groups == 1 else None
        shared = self._rows.groups > 1 and self._size % _WORD == 0 and self._rows.number_words <= _MOST_WORDS
        self._of_words = Shared(self._rows.number_words, "int32") if shared else None

    def __call__(self, row: Expr, value: Element, again: Callable[[Expr], Expr]) -> None:
        """again: the number of an element of any item."""
        k, rows, item = self._k, self._rows, calling(self._k).item
        found = Cell(T.float32(0.0))
        with self.strip.each() as (place, i):
            magnitude = let(T.abs(value(place, i)), "float32")
            with when(T.Or(magnitude > found.get(), is_nan(magnitude))):
                found.set(magnitude)
        scale, inverse = int8_scales(self._largest(found.get()))
        start = let(row * rows.words)
        with when(item == 0):
            k.put_raw("out", T.reinterpret("int32", scale), start + rows.number_words)
        total = Cell(T.int32(0), "int32")
        with self.strip.each_unit() as (turn, word):
            packed, added = Cell(T.int32(0), "int32"), Cell(T.int32(0), "int32")
            with self.strip.of_unit(turn, word) as (place, i, byte):
                number = let(int8_number(let(value(place, i), "float32") * inverse))
                packed.set(T.bitwise_or(packed.get(), T.shift_left(T.bitwise_and(number, T.int32(255)), byte * 8)))
                added.set(added.get() + number)
            k.put_raw("out", packed.get(), start + word)
            total.set(total.get() + added.get())
            if self._of_words is not None:
                self._of_words[word] = added.get()
        sums = let(start + (rows.number_words + 1))
        if self._sum is not None:
            whole = self._sum(total.get())
            with when(item == 0):
                k.put_raw("out", whole * self._factor, sums)
            return
        sync()  # the words of a group are of several items
        with spread(k, rows.groups) as group:
            total = Cell(T.int32(0), "int32")
            first = let(group * self._size)
            end = let(T.min(first + self._size, self._width))
            if self._of_words is not None:
                with T.serial(let(T.truncdiv(first, _WORD)), let(T.truncdiv(end + (_WORD - 1), _WORD))) as word:
                    total.set(total.get() + self._of_words[word])
            else:
                with T.serial(first, end) as i:
                    total.set(total.get() + int8_number(let(again(i), "float32") * inverse))
            k.put_raw("out", total.get() * self._factor, sums + group)
