"""rms_norm and quantize_rows: a group works on a row; each item takes every 64th element, and one tree adds the
sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec, Param
from llmc.compiler.targets.gpu.kernels.fold import Fold, add, largest
from llmc.compiler.targets.gpu.kernels.groups import calling, spread
from llmc.compiler.targets.gpu.kernels.linear import fma
from llmc.compiler.targets.reference.kernels.frame import Cell, Expr, Frame, is_nan, let, row_width, when
from llmc.compiler.targets.reference.kernels.rows import write_activation
from llmc.compiler.targets.reference.kernels.rows_int8 import Int8Rows, int8_number, int8_scales


def rms_norm(spec: KernelSpec) -> tirx.PrimFunc:
    p = spec.as_dict()
    dim, act = int(p["dim"]), str(p["act_dtype"])
    with Frame(spec.symbol(), {"x": "f32", "weight": "f32", "out": act}) as k:
        item, fold = calling(k).item, Fold(add)
        write = _Int8Row(k, dim, p) if act == "i8" else None
        with calling(k).share_groups(k.scalar(int(p["rows"]))) as row:
            squares = Cell(T.float32(0.0))
            with spread(k, dim) as i:
                x = let(k.raw("x", row * dim + i), "float32")
                squares.set(fma(x, x, squares.get()))
            mean = fold(item, squares.get()) / T.float32(dim)
            factor = let(T.float32(1.0) / T.sqrt(mean + T.float32(float(p["eps"]))), "float32")

            def value(i: Expr) -> Expr:
                return k.raw("x", row * dim + i) * factor * k.raw("weight", i)

            if write is not None:
                write(row, value)
            else:
                with spread(k, dim) as i:
                    write_activation(k, row, dim, act, i, value(i))
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
            write(row, lambda i: k.load("x", row * stride + i))
    return k.function()


class _Int8Row:
    """Quantizes rows of `width` numbers to the buffer `out`. params: group_size and sum_factor of the weight that reads
    them."""

    def __init__(self, k: Frame, width: int, params: Mapping[str, Param]) -> None:
        self._k, self._width, self._factor = k, width, int(params["sum_factor"])
        group_size = int(params["group_size"])
        self._size = width if group_size < 0 else group_size
        self._rows = Int8Rows(width, -(-width // self._size))
        self._largest, self._sums = Fold(largest), Fold(add, "int32")

    def __call__(self, row: Expr, value: Callable[[Expr], Expr]) -> None:
        k, rows, width, item = self._k, self._rows, self._width, calling(self._k).item
        found = Cell(T.float32(0.0))
        with spread(k, width) as i:
            magnitude = let(T.abs(value(i)), "float32")
            with when(T.Or(magnitude > found.get(), is_nan(magnitude))):
                found.set(magnitude)
        scale, inverse = int8_scales(self._largest(item, found.get()))
        start = let(row * rows.words)
        with when(item == 0):
            k.put_raw("out", T.reinterpret("int32", scale), start + rows.number_words)

        def number(i: Expr) -> Expr:
            return int8_number(let(value(i), "float32") * inverse)

        with spread(k, rows.number_words) as word:
            packed = Cell(T.int32(0), "int32")
            with T.serial(4) as byte:
                i = let(word * 4 + byte)
                with when(i < width):
                    packed.set(
                        T.bitwise_or(packed.get(), T.shift_left(T.bitwise_and(number(i), T.int32(255)), byte * 8))
                    )
            k.put_raw("out", packed.get(), start + word)
        sums = let(start + (rows.number_words + 1))
        if rows.groups == 1:
            total = Cell(T.int32(0), "int32")
            with spread(k, width) as i:
                total.set(total.get() + number(i))
            whole = self._sums(item, total.get())
            with when(item == 0):
                k.put_raw("out", whole * self._factor, sums)
            return
        with spread(k, rows.groups) as group:
            total = Cell(T.int32(0), "int32")
            first = let(group * self._size)
            with T.serial(first, let(T.min(first + self._size, width))) as i:
                total.set(total.get() + number(i))
            k.put_raw("out", total.get() * self._factor, sums + group)
