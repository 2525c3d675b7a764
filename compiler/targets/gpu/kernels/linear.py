"""linear and linear_quant: a group computes a tile of rows by 64 columns, with operands staged in shared memory.

Each sum is one chain over ascending K, independent of tile and other rows: fma for floats, exact for integers. Integers
that fit a byte are multiplied by fours, as words.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.gpu.kernels.groups import Shared, calling, spread, sync, turns
from llmc.compiler.targets.gpu.launch import ITEMS, LINEAR_ROWS
from llmc.compiler.targets.reference.kernels.experts import check_index
from llmc.compiler.targets.reference.kernels.frame import Cell, Expr, Frame, let, row_width, when
from llmc.compiler.targets.reference.kernels.linear import activated, activated_dtype
from llmc.compiler.targets.reference.kernels.matrices import matrix_of
from llmc.compiler.targets.reference.kernels.matrix import IntegerMatrix
from llmc.compiler.targets.reference.kernels.rows_int8 import Int8Rows

_STEP = 32  # elements of K staged at a time
_PITCH = ITEMS + 1  # row pitch of the staged weight: items that stage neighbours along K hit different banks

Element = Callable[[Frame, Expr, Expr], Expr]
"""An element of a row of x or of the weight, as it is multiplied."""


def fma(a: Expr, b: Expr, c: Expr) -> Expr:
    return T.call_pure_extern("float32", "fma", a, b, c)


class _Floats:
    """Float sums."""

    dtype = "float32"

    def __init__(self) -> None:
        self.sum = Cell(T.float32(0.0))

    def reset(self) -> None:
        self.sum.set(T.float32(0.0))

    def add(self, x: Expr, weight: Expr) -> None:
        self.sum.set(fma(x, weight, self.sum.get()))


class _Integers:
    """Exact integer sums, converted and scaled where a scale ends."""

    dtype = "int32"

    def __init__(self) -> None:
        self.sum, self._exact = Cell(T.float32(0.0)), Cell(T.int32(0), "int32")

    def reset(self) -> None:
        self.sum.set(T.float32(0.0))
        self._exact.set(T.int32(0))

    def add(self, x: Expr, weight: Expr) -> None:
        self._exact.set(self._exact.get() + x * weight)

    def fold(self, scale: Expr) -> None:
        self.sum.set(self.sum.get() + T.Cast("float32", self._exact.get()) * scale)
        self._exact.set(T.int32(0))


class _Words(_Integers):
    """Sums of words of four numbers."""

    def add(self, x: Expr, weight: Expr) -> None:
        self._exact.set(self._exact.get() + T.call_pure_extern("int32", "llmc_dot4", x, weight))


class _Problem:
    """The operands of a linear layer.

    kind: of sums. x, weight: their elements, or words of four of them. width: their number in a row. length: those of a
    scale for integer sums, else 0. step: those that are staged at a time.
    """

    def __init__(self, spec: KernelSpec) -> None:
        p = spec.as_dict()
        self.width, act = int(p["k"]), str(p["act_dtype"])
        self.length, self.step, stride = 0, _STEP, row_width(self.width, act) if act != "i8" else 0
        self.kind: type[_Floats | _Integers] = _Floats
        self.x: Element = lambda k, row, i: k.load("x", row * stride + i)
        if not spec.op.endswith("_quant"):
            self.inputs = {"x": act, "weight": str(p["weight_dtype"])}
            pitch = row_width(self.width, str(p["weight_dtype"]))
            self.weight: Element = lambda k, row, i: k.load("weight", row * pitch + i)
            return
        self.matrix = matrix = matrix_of(p, self.width)
        self.inputs = {"x": act, **matrix.operands()}
        self.weight = matrix.value
        if act == "i8":
            assert isinstance(matrix, IntegerMatrix)
            self.rows = rows = Int8Rows(self.width, matrix.scales)
            self.kind, self.weight = _Integers, matrix.whole
            self.x = lambda k, row, i: rows.number(k, "x", row, i)
            self.length = self.width if matrix.scales == 1 else matrix.group_size
            if 0 < self.length < self.width:
                self.step = gcd(self.length, _STEP)
            if matrix.fits_bytes and self.width % 4 == 0 and self.step % 4 == 0:
                self.kind, self.weight = _Words, lambda k, row, word: packed(k, matrix, row, word)
                self.x = lambda k, row, word: rows.word(k, "x", row, word)
                self.width, self.length, self.step = self.width // 4, self.length // 4, self.step // 4


def packed(k: Frame, matrix: IntegerMatrix, row: Expr, word: Expr) -> Expr:
    """Four numbers of a weight row as signed bytes, the first one in the low byte."""
    if (first := matrix.first_of_word(row, word)) is not None:
        # Unsigned bytes around 128.
        return T.bitwise_xor(T.call_pure_extern("int32", "llmc_word", k.address("weight", first)), T.int32(-0x7F7F7F80))
    found = Cell(T.int32(0), "int32")
    for byte in range(4):
        number = let(T.bitwise_and(matrix.whole(k, row, let(word * 4 + byte)), T.int32(255)))
        found.set(T.bitwise_or(found.get(), T.shift_left(number, T.int32(8 * byte))))
    return found.get()


class _Tile:
    """The sums of one item: one column (of each part) by several rows."""

    def __init__(self, k: Frame, problem: _Problem, parts: int, columns: int, num_rows: int) -> None:
        self._k, self._problem, self._parts, self._columns, self._num_rows = k, problem, parts, columns, num_rows
        self._xs = Shared(num_rows * problem.step, problem.kind.dtype)
        self._weights = [Shared(problem.step * _PITCH, problem.kind.dtype) for _ in range(parts)]
        self._sums: list[list[Any]] = [[problem.kind() for _ in range(num_rows)] for _ in range(parts)]

    def compute(self, row: Expr, rows: Expr, column: Expr, base: Expr) -> None:
        """row, column: first of the tile. rows: number of rows of x. base: first weight row, for an expert."""
        problem, width = self._problem, self._problem.width
        self._row, self._rows, self._column, self._base = row, rows, column, base
        self._alone = let(T.Cast("int32", rows - row == 1))
        for sums in self._sums:
            for one in sums:
                one.reset()
        step, length = problem.step, problem.length
        with turns(self._k, -(-width // step)) as turn:
            self._step(let(turn * step))
            if length and length < width:
                with when(T.truncmod(turn + 1, length // step) == 0):
                    self._fold(T.truncdiv(turn + 1, length // step) - 1)
        if length and (length == width or width % length):
            self._fold(T.int32(problem.matrix.scales - 1))

    def _step(self, first: Expr) -> None:
        """Stages and multiplies elements from `first` on, with zeros past the last one."""
        k, problem, count = self._k, self._problem, self._problem.step

        def part_of(value: Element, row: Expr, at: Expr) -> Expr:
            known = value(k, row, let(T.min(at, problem.width - 1)))
            if problem.width % count == 0:
                return known
            return T.Select(at < problem.width, known, T.Cast(problem.kind.dtype, T.int32(0)))

        sync()
        with spread(k, self._num_rows * count) as i:
            of, element = let(T.truncdiv(i, count)), let(T.truncmod(i, count))
            row = let(T.min(self._row + of, self._rows - 1))  # rows past the last one are computed, but not written
            self._xs[of * count + element] = part_of(problem.x, row, let(first + element))
        for part, staged in enumerate(self._weights):
            with spread(k, ITEMS * count) as i:
                of, element = let(T.truncdiv(i, count)), let(T.truncmod(i, count))
                row = let(T.min(self._column + of, self._columns - 1) + part * self._columns + self._base)
                staged[element * _PITCH + of] = part_of(problem.weight, row, let(first + element))
        sync()
        if self._num_rows == 1:
            self._multiply(1)
            return
        with T.If(self._alone == 1):
            with T.Then():
                self._multiply(1)
            with T.Else():
                self._multiply(self._num_rows)

    def _multiply(self, num_rows: int) -> None:
        item, step, dtype = calling(self._k).item, self._problem.step, self._problem.kind.dtype
        with T.serial(step) as element:
            weights = [let(staged[element * _PITCH + item], dtype) for staged in self._weights]
            for row in range(num_rows):
                x = let(self._xs[row * step + element], dtype)
                for sums, weight in zip(self._sums, weights, strict=True):
                    sums[row].add(x, weight)

    def _fold(self, group: Expr) -> None:
        k, of = self._k, let(group)
        for part, sums in enumerate(self._sums):
            column = let(self._column + calling(k).item)
            row = let(T.min(column, self._columns - 1) + part * self._columns + self._base)
            scale = let(self._problem.matrix.scale(k, row, of), "float32")
            for one in sums:
                one.fold(scale)

    def value(self, part: int, of: int, row: Expr) -> Expr:
        """The sum of tile row `of`, which is row `row` of x."""
        total = self._sums[part][of].sum.get()
        if self._problem.length:
            total = total * self._problem.rows.scale(self._k, "x", row)
        return let(total, "float32")


def linear(spec: KernelSpec) -> tirx.PrimFunc:
    p = spec.as_dict()
    n, act, of_experts = int(p["n"]), activated_dtype(p), "experts" in p
    columns, parts = (n // 2, 2) if p["gated"] else (n, 1)
    # An expert's rows are scattered among those of x.
    num_rows = 1 if of_experts else LINEAR_ROWS
    problem = _Problem(spec)
    optional = [name for name in ("bias", "residual") if p.get(name)]
    index = {"index": "i32"} if of_experts else {}
    stride = row_width(columns, act) if act else n
    tiles = -(-columns // ITEMS)
    with Frame(spec.symbol(), {**problem.inputs, **dict.fromkeys(optional, "f32"), **index, "out": act or "f32"}) as k:
        rows = let(k.raw("index", T.int32(0))) if of_experts else k.scalar(int(p["rows"]))
        tile = _Tile(k, problem, parts, columns, num_rows)
        row_tiles = let(T.truncdiv(rows + (num_rows - 1), num_rows))
        with calling(k).share_groups(let(row_tiles * tiles)) as unit:
            row = let(T.truncdiv(unit, tiles) * num_rows)
            first = let(T.truncmod(unit, tiles) * ITEMS)
            base = let(k.raw("index", 1 + row) * n) if of_experts else T.int32(0)
            tile.compute(row, rows, first, base)
            column = let(first + calling(k).item)

            def value(part: int, of: int, at: Expr) -> Expr:
                total = tile.value(part, of, at)
                if p["bias"]:
                    total = let(total + k.raw("bias", base + part * columns + column), "float32")
                return total

            for of in range(num_rows):
                at = let(row + of)
                with when(T.And(column < columns, at < rows)):
                    if act:
                        k.store("out", activated(p, *(value(i, of, at) for i in range(parts))), at * stride + column)
                        if stride > columns:
                            with when(column == columns - 1):
                                k.store("out", T.float32(0.0), at * stride + columns)
                    else:
                        total = value(0, of, at)
                        if p.get("residual"):
                            total = total + k.raw("residual", at * n + column)
                        k.store("out", total, at * stride + column)
    return k.function()


def expert_linear(spec: KernelSpec) -> tirx.PrimFunc:
    """Raises KernelSpecError."""
    check_index(spec)
    return linear(spec)
