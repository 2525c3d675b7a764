"""fused: the kernel of a row program (`compiler/graph/passes/rowwise.py`), element by element; reductions are kept per
row."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import prod
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.dtypes import HALVES
from llmc.compiler.kernel_spec import KernelSpec, KernelSpecError
from llmc.compiler.targets.reference.kernels import functions
from llmc.compiler.targets.reference.kernels.frame import (
    Array,
    Cell,
    Expr,
    Frame,
    is_nan,
    let,
    rounded,
    row_width,
    when,
    widened,
)


def _rounder(dtype: str) -> Callable[[Expr], Expr]:
    return lambda x: widened(dtype, rounded(dtype, x))


_IDENTITY = {"sum": 0.0, "max": float("-inf"), "min": float("inf")}
_FLOAT: dict[str, Callable[..., Expr]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    # NaN stays NaN, as in torch.
    "max": lambda x, y: T.Select(T.Or(x > y, is_nan(x)), x, y),
    "min": lambda x, y: T.Select(T.Or(x < y, is_nan(x)), x, y),
    "exp": functions.exp,
    "tanh": functions.tanh,
    "erf": functions.erf,
    "log": functions.log,
    "sigmoid": functions.sigmoid,
    "sqrt": functions.sqrt,
    "abs": T.abs,
    "floor": functions.floor,
    "ceil": functions.ceil,
    "round": functions.nearest,
    **{f"to_{dtype}": _rounder(dtype) for dtype in HALVES},
}
_COMPARE: dict[str, Callable[[Expr, Expr], Expr]] = {
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
}
_INTEGER: dict[str, Callable[[Expr, Expr], Expr]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "floordiv": T.floordiv,
    "floormod": T.floormod,
    "max": T.max,
    "min": T.min,
}
_OTHER: dict[str, Callable[..., Expr]] = {
    "and": tirx.And,
    "or": tirx.Or,
    "not": tirx.Not,
    "bool_to_float": lambda x: T.Select(x, T.float32(1.0), T.float32(0.0)),
    "bool_to_int": lambda x: T.Select(x, T.int32(1), T.int32(0)),
    "int_of_float": lambda x: T.Cast("int32", x),
    "float_of_int": lambda x: T.Cast("float32", x),
}
_KINDS = {"float": "float32", "int": "int32"}


class Row:
    """The expressions of one row."""

    def __init__(self, k: Frame, program: dict[str, Any], row: Expr) -> None:
        self._k, self._program, self._row = k, program, row
        self._kept: dict[int, Array] = {}

    def index(self, e: Any, axes: Sequence[Expr]) -> Expr:
        if isinstance(e, int):
            return T.int32(e)
        if e[0] == "x":
            return axes[e[1]]
        if e[0] == "select":
            test = _COMPARE[e[1][0]](self.index(e[1][1], axes), self.index(e[1][2], axes))
            return T.Select(test, self.index(e[2], axes), self.index(e[3], axes))
        return _INTEGER[e[0]](self.index(e[1], axes), self.index(e[2], axes))

    def value(self, e: Any, axes: Sequence[Expr], guarded: bool) -> Expr:
        """The value of an expression. guarded: loads may lie outside their buffer, and are clamped into it."""
        match e[0]:
            case "const":
                return T.float32(float(e[1]))
            case "int":
                return T.int32(e[1])
            case "index":
                return self.index(e[1], axes)
            case "load":
                return self._load(e[1], self.index(e[2], axes), guarded)
            case "stage":
                return self._stage(e[1], [self.index(i, axes) for i in e[2]], guarded)
            case "select":
                # Either branch may read out of bounds where its condition is false.
                return T.Select(*(self.value(part, axes, guarded or i > 0) for i, part in enumerate(e[1:])))
        values = [self.value(argument, axes, guarded) for argument in e[1:]]
        name = e[0].removeprefix("int_")
        for table in (_INTEGER,) if name != e[0] else (_FLOAT, _COMPARE, _OTHER):
            if name in table:
                return table[name](*values)
        raise KernelSpecError(f"a row program has the unknown operation {e[0]!r}")

    def _load(self, number: int, offset: Expr, guarded: bool) -> Expr:
        source, name = self._program["inputs"][number], f"in{number}"
        width = prod(source["shape"])
        offset = let(offset)
        if guarded:
            offset = let(T.max(T.min(offset, width - 1), 0))
        stride = row_width(width, source["dtype"]) if source["packed"] else width
        at = let(self._row * stride + offset) if source["row"] else offset
        if source["dtype"] == "bool":
            return self._k.raw(name, at) != T.uint8(0)
        value = self._k.load(name, at)
        return let(value, "int32" if source["dtype"] == "i32" else "float32")

    def _stage(self, number: int, axes: Sequence[Expr], guarded: bool) -> Expr:
        stage = self._program["stages"][number]
        if not stage["reduce"]:
            axes = [let(axis) for axis in axes]
            value = self.value(stage["expr"], axes, guarded)
            return value if stage["kind"] == "bool" else let(value, _KINDS[stage["kind"]])
        offset = flat(axes, stage["shape"])
        if guarded:
            offset = T.max(T.min(offset, prod(stage["shape"]) - 1), 0)
        return self._kept[number][let(offset)]

    def term(self, number: int, spatial: Sequence[Expr], walked: Sequence[Expr]) -> Expr:
        """The term that a reduction adds at one position."""
        return let(self.value(self._program["stages"][number]["expr"], [*spatial, *walked], False), "float32")

    def combine(self, number: int) -> Callable[[Expr, Expr], Expr]:
        return combination(self._program["stages"][number]["reduce"])

    def start(self, number: int) -> Expr:
        """The result of an empty reduction."""
        return T.float32(_IDENTITY[self._program["stages"][number]["reduce"]])

    def keep(self, number: int, values: Array) -> None:
        """Sets a reduction's results for this row."""
        self._kept[number] = values

    def reduce(self, number: int) -> None:
        """Computes a reduction for this row."""
        stage = self._program["stages"][number]
        self.keep(number, Array(prod(stage["shape"])))
        with ExitStack() as loops:
            spatial = [loops.enter_context(T.serial(extent)) for extent in stage["shape"]]
            total = Cell(self.start(number))
            with ExitStack() as inner:
                walked = [inner.enter_context(T.serial(extent)) for extent in stage["extents"]]
                total.set(self.combine(number)(total.get(), self.term(number, spatial, walked)))
            self._kept[number][flat(spatial, stage["shape"])] = total.get()

    def put(self, number: int, axes: Sequence[Expr]) -> None:
        """Writes one element of an output of this row."""
        out, name = self._program["outputs"][number], f"out{number}"
        shape, dtype, width = out["shape"], out["dtype"], prod(out["shape"])
        stride = row_width(width, dtype) if out["packed"] else width
        offset, start = flat(axes, shape), self._row * stride if out["row"] else T.int32(0)
        value, at = self._stage(out["stage"], axes, False), let(start + offset)
        if dtype == "bool":
            self._k.put_raw(name, T.Select(value, T.uint8(1), T.uint8(0)), at)
        else:
            self._k.store(name, value, at)
        if stride > width:
            with when(offset == width - 1):
                self._k.store(name, T.float32(0.0), start + width)

    def write(self, number: int) -> None:
        """Writes an output of this row."""
        with ExitStack() as loops:
            self.put(number, [loops.enter_context(T.serial(n)) for n in self._program["outputs"][number]["shape"]])


def combination(how: str) -> Callable[[Expr, Expr], Expr]:
    """The binary operation of a reduction."""
    return _FLOAT["add" if how == "sum" else how]


def flat(axes: Sequence[Expr], shape: Sequence[int]) -> Expr:
    """The row-major index of an element."""
    offset: Expr = T.int32(0)
    for axis, extent in zip(axes, shape, strict=True):
        offset = offset * extent + axis
    return offset


def program_of(spec: KernelSpec) -> tuple[dict[str, Any], dict[str, str]]:
    """The row program of a kernel, and its buffers."""
    program: dict[str, Any] = json.loads(str(spec.as_dict()["program"]))
    buffers = {f"in{i}": str(tensor["dtype"]) for i, tensor in enumerate(program["inputs"])}
    return program, buffers | {f"out{i}": str(tensor["dtype"]) for i, tensor in enumerate(program["outputs"])}


def fused(spec: KernelSpec) -> tirx.PrimFunc:
    program, buffers = program_of(spec)
    with Frame(spec.symbol(), buffers) as k, k.share(k.scalar(int(spec.as_dict()["rows"]))) as row:
        emitted = Row(k, program, row)
        for number, stage in enumerate(program["stages"]):
            if stage["reduce"]:
                emitted.reduce(number)
        for number in range(len(program["outputs"])):
            emitted.write(number)
    return k.function()
