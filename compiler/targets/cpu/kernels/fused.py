"""fused: the kernel of a row program (`passes/rowwise.py`): generic ops, one row at a time, 16 lanes on the last axis.

A stage without a reduction is recomputed where it is read; a reduction's result is kept for the row. A reduction adds
vectors in ascending order, then folds the lanes in one tree, so a row's bits depend on that row alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.dtypes import HALVES
from llmc.compiler.kernel_spec import KernelSpec, KernelSpecError
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.ir import elementary, vector
from llmc.compiler.targets.cpu.target import Target

_BLOCK = 256  # columns per unit of work, so that one row occupies several tasks
_TIR = {**b.TIR_DTYPE, "bool": "uint8"}
_VECTOR = {**dict.fromkeys(b.LANES, "float32"), "i32": "int32", "bool": "int32"}
_IDENTITY = {"sum": 0.0, "max": float("-inf"), "min": float("inf")}
_COMBINE = {"sum": "add", "max": "maximum", "min": "minimum"}
_FOLD = {"sum": "sum_lanes", "max": "maximum_lanes", "min": "minimum_lanes"}
_INTRINSICS = tuple(name for name, _ in elementary.UNARY_INTRINSICS)
_UNARY = ("exp", "tanh", "erf", "log", "sigmoid", "sqrt", *(f"to_{dtype}" for dtype in HALVES), *_INTRINSICS)
_BINARY = ("add", "sub", "mul", "div", "max", "min")
# Helpers made for llmc ops rely on their argument ranges; these equal torch's functions for every float.
_HELPERS = {"exp": "exp_any", "max": "maximum", "min": "minimum"}
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
}
_INTEGER: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "floordiv": T.floordiv,
    "floormod": T.floormod,
    "max": T.max,
    "min": T.min,
}


def program_of(spec: KernelSpec) -> dict[str, Any]:
    """The row program in the spec's parameters."""
    program: dict[str, Any] = json.loads(str(spec.as_dict()["program"]))
    return program


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    program = program_of(spec)
    names = [f"in{i}" for i in range(len(program["inputs"]))]
    return (*names, *(f"out{i}" for i in range(len(program["outputs"]))))


@dataclass(frozen=True)
class _Index:
    """An int32 index of 16 lanes.

    at: its value at a lane. step: the constant difference between neighbouring lanes, or None. key: equal for equal
    indices within one emission.
    """

    key: str
    step: int | None
    at: Callable[[int], Any]


def _constant(value: int) -> _Index:
    return _Index(str(value), 0, lambda lane: T.int32(value))


def _scalar_index(value: Any, key: str) -> _Index:
    return _Index(key, 0, lambda lane: value)


def _lane_index(base: Any, key: str) -> _Index:
    return _Index(key, 1, lambda lane: base + lane)


def _combine(op: str, x: _Index, y: _Index) -> _Index:
    step: int | None = None
    if x.step == 0 and y.step == 0:
        step = 0
    elif x.step is not None and y.step is not None:
        if op in ("add", "sub"):
            step = x.step + y.step if op == "add" else x.step - y.step
        elif op == "mul" and x.step == 0 and x.key.lstrip("-").isdigit():
            step = int(x.key) * y.step
        elif op == "mul" and y.step == 0 and y.key.lstrip("-").isdigit():
            step = x.step * int(y.key)
    return _Index(f"({op} {x.key} {y.key})", step, lambda lane: _INTEGER[op](x.at(lane), y.at(lane)))


class _Emitter:
    """Emits the vectors of one row."""

    def __init__(self, kernel: b.Kernel, program: dict[str, Any], row_tile: int) -> None:
        self.kernel = kernel
        self.program = program
        self.row_tile = row_tile
        self.row: Any = None
        self.kept: dict[int, Any] = {}  # reduction stages: their values for this row
        self._memo: dict[str, Any] = {}
        self._count = b.WIDTH

    @contextmanager
    def piece(self, count: int) -> Iterator[None]:
        """Emits one vector with `count` valid lanes; equal subexpressions are computed once."""
        before = self._memo, self._count
        self._memo, self._count = {}, count
        yield
        self._memo, self._count = before

    # --- indices ---------------------------------------------------------------------------------------------------

    def index(self, e: Any, axes: Sequence[_Index]) -> _Index:
        if isinstance(e, int):
            return _constant(e)
        if e[0] == "x":
            return axes[int(e[1])]
        if e[0] == "select":
            condition, x, y = e[1], self.index(e[2], axes), self.index(e[3], axes)
            left, right = self.index(condition[1], axes), self.index(condition[2], axes)
            step = 0 if not any(i.step for i in (x, y, left, right)) and None not in (x.step, y.step) else None
            key = f"(select {condition[0]} {left.key} {right.key} {x.key} {y.key})"
            test = _COMPARE[condition[0]]
            return _Index(key, step, lambda n: T.Select(test(left.at(n), right.at(n)), x.at(n), y.at(n)))
        return _combine(e[0], self.index(e[1], axes), self.index(e[2], axes))

    # --- values ----------------------------------------------------------------------------------------------------

    def value(self, e: Any, axes: Sequence[_Index], guarded: bool) -> Any:
        """16 lanes of an expression. guarded: loads may lie outside their buffer, and are clamped into it."""
        op = e[0]
        if op == "const":
            return b.splat(float(e[1]))
        if op == "int":
            return T.broadcast(T.int32(e[1]), b.WIDTH)
        if op == "index":
            return self._gather_int(self.index(e[1], axes))
        if op == "load":
            return self._load(e[1], self.index(e[2], axes), guarded)
        if op == "stage":
            return self._stage(e[1], [self.index(i, axes) for i in e[2]], guarded)
        if op == "select":
            condition = self.value(e[1], axes, guarded)
            # Either branch may read out of bounds where its condition is false.
            return T.Select(condition, self.value(e[2], axes, True), self.value(e[3], axes, True))
        values = [self.value(argument, axes, guarded) for argument in e[1:]]
        return self._apply(op, values)

    def _apply(self, op: str, values: list[Any]) -> Any:
        if op in _UNARY or op in _BINARY:
            return b.call(_HELPERS.get(op, op), *values)
        if op in _COMPARE:
            return _COMPARE[op](*values)
        if op.startswith("int_"):
            return _INTEGER[op.removeprefix("int_")](*values)
        match op:
            case "and":
                return tirx.And(*values)
            case "or":
                return tirx.Or(*values)
            case "not":
                return tirx.Not(*values)
            case "bool_to_float":
                return T.Select(values[0], b.splat(1.0), b.splat(0.0))
            case "bool_to_int":
                return T.Select(values[0], T.broadcast(T.int32(1), b.WIDTH), T.broadcast(T.int32(0), b.WIDTH))
            case "int_of_float":
                return T.Cast("int32x16", values[0])
            case "float_of_int":
                return T.Cast("float32x16", values[0])
        raise KernelSpecError(f"a row program has the unknown operation {op!r}")

    def _gather(self, dtype: str, index: _Index, read: Callable[[Any], Any]) -> Any:
        cell = b.Vectors(1, dtype)
        zero = T.int32(0) if dtype == "int32" else T.float32(0)
        for lane in range(b.WIDTH):
            b.store(cell.buffer, read(index.at(lane)) if lane < self._count else zero, lane)
        return cell[0]

    def _gather_int(self, index: _Index) -> Any:
        if index.step == 0:
            return T.broadcast(index.at(0), b.WIDTH)
        return self._gather("int32", index, lambda value: value)

    def _load(self, number: int, index: _Index, guarded: bool) -> Any:
        key = f"load {number} {index.key} {guarded}"
        dtype = self.program["inputs"][number]["dtype"]
        if key not in self._memo:
            cell = b.Vectors(1, _VECTOR[dtype])
            cell[0] = self._load_vector(number, index, guarded)
            self._memo[key] = cell[0] if dtype != "bool" else cell[0] != T.broadcast(T.int32(0), b.WIDTH)
        return self._memo[key]

    def _load_vector(self, number: int, index: _Index, guarded: bool) -> Any:
        source, buffer = self.program["inputs"][number], self.kernel[f"in{number}"]
        dtype, size = source["dtype"], prod(source["shape"])

        def read(offset: Any) -> Any:
            value = buffer[self._position(source, T.max(T.min(offset, size - 1), 0) if guarded else offset)]
            if dtype == "bool":
                return T.Cast("int32", value)
            if dtype in HALVES:
                return b.half_of(dtype, T.Cast("int32", value), 0)
            return value

        if index.step == 0:
            return T.broadcast(read(index.at(0)), b.WIDTH)
        contiguous = index.step == 1 and not guarded and (not source["packed"] or self.row_tile == 1)
        if contiguous and dtype in b.LANES:
            return b.load_vector(buffer, self._position(source, index.at(0)), self._count, dtype)
        if contiguous and dtype == "i32" and self._count == b.WIDTH:
            return buffer[T.ramp(self._position(source, index.at(0)), 1, b.WIDTH)]
        return self._gather(_VECTOR[dtype], index, read)

    def _position(self, source: dict[str, Any], offset: Any) -> Any:
        """Index in the whole buffer of an offset into this row."""
        if not source["row"]:
            return offset
        width = prod(source["shape"])
        if not source["packed"]:
            return self.row * width + offset
        lanes = b.lanes_of(source["dtype"])
        base = b.packed_position(self.row, self.row_tile, b.ceil_div(width, lanes)) * lanes
        if lanes == 1:
            return base + offset * self.row_tile
        word = T.truncdiv(offset, lanes)
        return base + word * (lanes * self.row_tile) + T.truncmod(offset, lanes)

    def _stage(self, number: int, axes: list[_Index], guarded: bool) -> Any:
        stage = self.program["stages"][number]
        key = f"stage {number} {' '.join(a.key for a in axes)} {guarded}"
        if key in self._memo:
            return self._memo[key]
        if not stage["reduce"]:
            value = self.value(stage["expr"], axes, guarded)
            if stage["kind"] != "bool":
                cell = b.Vectors(1, "int32" if stage["kind"] == "int" else "float32")
                cell[0] = value
                value = cell[0]
        else:
            value = self._kept(number, axes, guarded)
        self._memo[key] = value
        return value

    def _kept(self, number: int, axes: list[_Index], guarded: bool) -> Any:
        shape, array = self.program["stages"][number]["shape"], self.kept[number]
        offset = _constant(0)
        for axis, extent in zip(axes, shape, strict=True):
            offset = _combine("add", _combine("mul", offset, _constant(extent)), axis)
        last = prod(shape) - 1

        def read(index: Any) -> Any:
            return array[T.max(T.min(index, last), 0) if guarded else index]

        if all(axis.step == 0 for axis in axes):
            return T.broadcast(read(offset.at(0)), b.WIDTH)
        return self._gather("float32", offset, read)

    # --- statements ------------------------------------------------------------------------------------------------

    def reduce(self, number: int) -> None:
        """Computes a reduction stage for this row into its array."""
        stage = self.program["stages"][number]
        shape, extents, kind = stage["shape"], stage["extents"], stage["reduce"]
        with ExitStack() as loops:
            axes = [loops.enter_context(T.serial(extent)) for extent in shape]
            spatial = [_scalar_index(axis, f"s{i}") for i, axis in enumerate(axes)]
            total = b.Vectors(1)
            total[0] = b.splat(_IDENTITY[kind])
            with ExitStack() as outer:
                walked = [outer.enter_context(T.serial(extent)) for extent in extents[:-1]]
                fixed = [*spatial, *(_scalar_index(axis, f"r{i}") for i, axis in enumerate(walked))]

                def add(base: Any, count: int) -> None:
                    with self.piece(count):
                        value = self.value(stage["expr"], [*fixed, _lane_index(base, "lane")], False)
                        if count < b.WIDTH:
                            lanes = T.ramp(T.int32(0), 1, b.WIDTH)
                            valid = lanes < T.broadcast(T.int32(count), b.WIDTH)
                            value = T.Select(valid, value, b.splat(_IDENTITY[kind]))
                        total[0] = b.call(_COMBINE[kind], total[0], value)

                self._over(T.int32(0), extents[-1], add)
            total[0] = b.call(_FOLD[kind], total[0])
            offset: Any = T.int32(0)
            for axis, extent in zip(axes, shape, strict=True):
                offset = offset * extent + axis
            b.store(self.kept[number], total.lane(0), offset)

    def _over(self, start: Any, width: int, body: Callable[[Any, int], None]) -> None:
        """Calls `body` for each vector of [start, start + width)."""
        full, tail = width // b.WIDTH, width % b.WIDTH
        if full:
            with T.serial(full) as step:
                body(b.let(start + step * b.WIDTH), b.WIDTH)
        if tail:
            body(b.let(start + full * b.WIDTH), tail)

    def write(self, number: int, outer: Sequence[Any], first: Any, width: int) -> None:
        """Writes columns [first, first + width) of one line of this row's output."""
        out, buffer = self.program["outputs"][number], self.kernel[f"out{number}"]
        shape, dtype = out["shape"], out["dtype"]
        fixed = [_scalar_index(axis, f"s{i}") for i, axis in enumerate(outer)]

        def put(base: Any, count: int) -> None:
            with self.piece(count):
                lane = [_lane_index(base, "lane")] if shape else []
                value = self._stage(out["stage"], [*fixed, *lane], False)
                if out["packed"]:
                    words = b.ceil_div(prod(shape), b.lanes_of(dtype))
                    position = b.packed_position(self.row, self.row_tile, words)
                    b.put(buffer, value, position, base, dtype, self.row_tile, count)
                    return
                offset: Any = self.row if out["row"] else T.int32(0)
                for axis, extent in zip([*outer, base][: len(shape)], shape, strict=True):
                    offset = offset * extent + axis
                if dtype in b.LANES:
                    b.store_vector(buffer, value, offset, count, dtype)
                    return
                cell = b.Vectors(1, "int32")
                cell[0] = value if dtype == "i32" else self._apply("bool_to_int", [value])
                for element in range(count):
                    b.store(buffer, T.Cast(_TIR[dtype], cell.lane(element)), offset + element)

        self._over(first, width, put)


def _tasks(k: b.Kernel, emitter: _Emitter, rows: Any, number: int) -> None:
    """Splits lines of an output without reductions into blocks, so that one row occupies several tasks."""
    shape = emitter.program["outputs"][number]["shape"]
    lines, width = prod(shape[:-1]), shape[-1] if shape else 1
    blocks = b.ceil_div(width, _BLOCK)
    with k.share(rows * (lines * blocks)) as unit:
        emitter.row = b.let(T.truncdiv(unit, lines * blocks))
        rest = b.let(T.truncmod(unit, lines * blocks))
        line, block = b.let(T.truncdiv(rest, blocks)), b.let(T.truncmod(rest, blocks))
        outer, below = [], lines
        for extent in shape[:-1]:
            below //= extent
            outer.append(b.let(T.truncmod(T.truncdiv(line, below), extent)))
        if blocks == 1:
            emitter.write(number, outer, T.int32(0), width)
            return
        with T.If(block < blocks - 1):
            with T.Then():
                emitter.write(number, outer, b.let(block * _BLOCK), _BLOCK)
            with T.Else():
                emitter.write(number, outer, T.int32((blocks - 1) * _BLOCK), width - (blocks - 1) * _BLOCK)


def build(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    p, program = spec.as_dict(), program_of(spec)
    row_tile = int(p["row_tile"])
    stages, outputs = program["stages"], program["outputs"]
    reductions = [i for i, stage in enumerate(stages) if stage["reduce"]]
    puts = {
        (out["dtype"], row_tile, count)
        for out in outputs
        if out["packed"]
        for count in (16, prod(out["shape"]) % 16 or 16)
    }
    arguments = [(f"in{i}", _TIR[source["dtype"]]) for i, source in enumerate(program["inputs"])]
    arguments += [
        (f"out{i}", b.word_dtype(out["dtype"]) if out["packed"] else _TIR[out["dtype"]])
        for i, out in enumerate(outputs)
    ]
    helpers = vector.helpers(target.mcpu, puts=tuple(sorted(puts))) + elementary.helpers()
    kernel = b.Kernel(spec.symbol(), arguments, helpers)
    with kernel as k:
        emitter = _Emitter(k, program, row_tile)
        rows = k.scalar(int(p["rows"]))
        if not reductions:
            for number in range(len(outputs)):
                _tasks(k, emitter, rows, number)
        else:
            with k.share(rows) as row:
                emitter.row = row
                for number in reductions:
                    size = prod(stages[number]["shape"])
                    emitter.kept[number] = T.alloc_buffer((size,), "float32", scope="local")
                    emitter.reduce(number)
                for number, out in enumerate(outputs):
                    shape = out["shape"]
                    with ExitStack() as loops:
                        outer = [loops.enter_context(T.serial(extent)) for extent in shape[:-1]]
                        emitter.write(number, outer, T.int32(0), shape[-1] if shape else 1)
    return kernel.function()
