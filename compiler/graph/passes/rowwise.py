"""A legalised PrimFunc as a row program: each output row as a function of the same row of the inputs.

This checks that a row's value depends on that row alone: an op that mixes token rows has no row program. The program is
plain data (JSON), so a kernel spec can hold it; `kernels/fused.py` makes the kernel.

    inputs   [{dtype, shape, row, packed}]   shape without the row axis; row: there is one
    stages   [{shape, kind, reduce, extents, expr}]   reduce null, sum, max or min over axes that follow those of shape
    outputs  [{dtype, shape, row, packed, stage}]

An expression is [op, argument…]; ["x", n] is axis n of its stage, ["load", input, offset in the row],
["stage", number, [indices]].
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from tvm import ir, s_tir, sym, tirx
from tvm.ir.prim import expr as prim

from llmc.compiler.dtypes import FLOATS, FLOATS_BY_LONG_NAME, HALVES, I32

DTYPES = {**{dtype.long_name: dtype.name for dtype in (*FLOATS.values(), I32)}, "bool": "bool"}
_KINDS = {**dict.fromkeys(FLOATS_BY_LONG_NAME, "float"), "int32": "int", "int64": "int", "bool": "bool"}
_FLOATS = ", ".join(FLOATS_BY_LONG_NAME)
# Row counts for proofs about indices: an equality that holds for a small and a large prime is taken to hold for all.
_ROWS = (7, 1_048_583)
_ON_ROWS = "depends on the number of token rows in the batch"
_MAX_KEPT_BYTES = 1 << 16
_MAX_JOINED_SUMS = 64
_BINARY = {
    prim.Add: "add", prim.Sub: "sub", prim.Mul: "mul", prim.Max: "max", prim.Min: "min",
    prim.FloorDiv: "floordiv", prim.FloorMod: "floormod",
}  # fmt: skip
# (op, whether its arguments are swapped)
_COMPARE = {
    prim.LT: ("lt", False), prim.LE: ("le", False), prim.GT: ("lt", True), prim.GE: ("le", True),
    prim.EQ: ("eq", False), prim.NE: ("ne", False),
}  # fmt: skip
_UNARY = {
    "exp": "exp", "tanh": "tanh", "erf": "erf", "log": "log", "sigmoid": "sigmoid", "sqrt": "sqrt", "fabs": "abs",
    "abs": "abs", "floor": "floor", "ceil": "ceil", "round": "round", "nearbyint": "round",
}  # fmt: skip


class RowwiseError(ValueError):
    """The function mixes rows. The message completes a sentence that names the op."""


def _children(e: Any) -> tuple[Any, ...]:
    if isinstance(e, ir.TensorLoad):
        return tuple(e.indices)
    if isinstance(e, ir.Call):
        return tuple(e.args)
    names = ("a", "b", "value", "condition", "true_value", "false_value")
    return () if isinstance(e, (tirx.IntImm, tirx.FloatImm)) else tuple(getattr(e, n) for n in names if hasattr(e, n))


def _some(e: Any, holds: Callable[[Any], bool]) -> bool:
    """Whether `holds` is true of any subexpression."""
    return holds(e) or any(_some(child, holds) for child in _children(e))


def _mentions(e: Any, var: Any) -> bool:
    return _some(e, lambda part: isinstance(part, tirx.Var) and part.same_as(var))


class _Stage:
    """One block, which writes `buffer`. row: position of the row axis in the buffer; None without one."""

    def __init__(self, block: Any, rows: Any | None) -> None:
        body = block.body
        if not isinstance(body, tirx.BufferStore):
            raise RowwiseError("has a body that is not one store")
        self.block, self.store, self.buffer = block, body, body.buffer
        self.spatial = [iv for iv in block.iter_vars if int(iv.iter_type) == 0]
        self.reduced = [iv for iv in block.iter_vars if int(iv.iter_type) == 2]
        if len(self.spatial) + len(self.reduced) != len(block.iter_vars):
            raise RowwiseError("has an ordered loop")
        # Writes name each axis once, or 0 for an axis of extent 1.
        self.row = _row_axis(self.buffer.shape, rows)
        self.row_var = None
        for iv in self.reduced:
            if rows is not None and _mentions(iv.dom.extent, rows):
                raise RowwiseError("reduces over the token rows")
        if self.row is not None:
            index = body.indices[self.row]
            if not isinstance(index, tirx.Var):
                raise RowwiseError("writes rows by a computed index")
            self.row_var = index


def _row_axis(shape: Sequence[Any], rows: Any | None) -> int | None:
    """The axis whose extent is the number of rows; None without one. Raises RowwiseError if rows occur in any other
    form."""
    found = [axis for axis, extent in enumerate(shape) if not isinstance(extent, tirx.IntImm)]
    if not found:
        return None
    if len(found) > 1 or rows is None or not shape[found[0]].same_as(rows):
        raise RowwiseError(f"has a tensor of shape {_sizes(shape)}, not one row a token")
    return found[0]


def _blocks(statement: Any) -> list[Any]:
    """The blocks in order of execution."""
    if isinstance(statement, tirx.SeqStmt):
        return [block for part in statement.seq for block in _blocks(part)]
    if isinstance(statement, tirx.For):
        return _blocks(statement.body)
    if isinstance(statement, s_tir.SBlockRealize):
        if statement.block.name_hint == "root":
            return _blocks(statement.block.body)
        return [statement.block]
    raise RowwiseError("has a loop nest that is not made of elementwise steps and reductions")


def rows_of(func: tirx.PrimFunc) -> Any | None:
    """The symbol that counts rows in the function's buffers. Raises RowwiseError if there are several."""
    found: list[Any] = []
    for param in func.params:
        if not hasattr(param, "shape"):  # a size passed as a number
            raise RowwiseError(_ON_ROWS)
        for extent in param.shape:
            if not isinstance(extent, tirx.IntImm):
                if not isinstance(extent, tirx.Var):
                    shape = _sizes(param.shape)
                    raise RowwiseError(f"has a tensor of shape {shape}, whose sizes are neither fixed nor one a token")
                if not any(extent.same_as(other) for other in found):
                    found.append(extent)
    if len(found) > 1:
        raise RowwiseError(f"mixes tensors of {' and '.join(str(f.name) for f in found)} rows")
    return found[0] if found else None


class _Converter:
    def __init__(self, func: tirx.PrimFunc, num_outputs: int, constants: Mapping[int, float]) -> None:
        self.rows = rows_of(func)
        if self.rows is None:
            raise RowwiseError("has no token rows")
        self.params = list(func.params)
        self.num_inputs = len(self.params) - num_outputs
        self.constants = constants
        self.kept_inputs = [i for i in range(self.num_inputs) if i not in constants]
        self.stages: list[_Stage] = []
        self.programs: list[dict[str, Any]] = []
        for block in _blocks(func.body):
            stage = _Stage(block, self.rows)
            self.programs.append(self._stage(stage))
            self.stages.append(stage)

    # --- program ---------------------------------------------------------------------------------------------------

    def program(self) -> dict[str, Any]:
        inputs = [self._buffer(self.params[i]) for i in self.kept_inputs]
        outputs = []
        for param in self.params[self.num_inputs :]:
            number = self._writer(param)
            if number is None:
                raise RowwiseError("leaves an output unwritten")
            outputs.append({**self._buffer(param), "stage": number})
            if not outputs[-1]["row"]:
                raise RowwiseError("computes a tensor without token rows; register it as a buffer of the module")
        return {"inputs": inputs, "stages": self.programs, "outputs": outputs}

    def _buffer(self, buffer: Any) -> dict[str, Any]:
        axis = _row_axis(buffer.shape, self.rows)
        if axis not in (None, 0):
            raise RowwiseError(f"has the token rows on axis {axis} of a tensor {_sizes(buffer.shape)}; keep them first")
        dtype = str(buffer.dtype)
        if dtype not in DTYPES:
            raise RowwiseError(f"has a {dtype} tensor; {_FLOATS}, int32 and bool are supported")
        shape = [int(extent) for extent in buffer.shape[(0 if axis is None else 1) :]]
        return {"dtype": DTYPES[dtype], "shape": shape, "row": axis is not None, "packed": False}

    def _writer(self, buffer: Any) -> int | None:
        for number in reversed(range(len(self.stages))):
            if self.stages[number].buffer.same_as(buffer):
                return number
        return None

    def _stage(self, stage: _Stage) -> dict[str, Any]:
        self._stage_now = stage
        self._analyzers = []
        for rows in _ROWS:
            analyzer = sym.Analyzer()
            for iv in stage.block.iter_vars:
                extent = rows if iv.dom.extent.same_as(self.rows) else int(iv.dom.extent)
                analyzer.bind(iv.var, ir.Range(_like(iv.var, 0), _like(iv.var, extent)))
            analyzer.bind(self.rows, _like(self.rows, rows))
            self._analyzers.append(analyzer)
        axes = [iv for iv in stage.spatial if stage.row_var is None or not iv.var.same_as(stage.row_var)]
        order: list[Any] = []
        shape = []
        for axis, index in enumerate(stage.store.indices):
            if axis == stage.row:
                continue
            shape.append(int(stage.buffer.shape[axis]))
            if isinstance(index, tirx.IntImm):
                order.append(None)
                continue
            order.append(index)
        self._axes: list[tuple[Any, int]] = [(var, i) for i, var in enumerate(order) if var is not None]
        known = [var for var, _ in self._axes]
        for iv in axes:
            if not any(iv.var.same_as(var) for var in known) and int(iv.dom.extent) != 1:
                raise RowwiseError("writes by a computed index")
        extents = [int(iv.dom.extent) for iv in stage.reduced]
        self._axes += [(iv.var, len(order) + i) for i, iv in enumerate(stage.reduced)]
        kind = _kind(stage.buffer)
        reduce, value = None, stage.store.value
        if stage.reduced:
            reduce, value = self._reduction(stage)
            if kind != "float":
                raise RowwiseError(f"reduces {stage.buffer.dtype} values; {_FLOATS} are supported")
            if 4 * prod(shape) > _MAX_KEPT_BYTES:
                raise RowwiseError(
                    f"keeps {prod(shape)} sums a row, at most {_MAX_KEPT_BYTES // 4} fit; use llmc.linear for a matrix"
                )
        return {"shape": shape, "kind": kind, "reduce": reduce, "extents": extents, "expr": self._value(value)}

    def _reduction(self, stage: _Stage) -> tuple[str, Any]:
        value = stage.store.value
        for kind, name in ((prim.Add, "sum"), (prim.Max, "max"), (prim.Min, "min")):
            if isinstance(value, kind):
                for own, other in ((value.a, value.b), (value.b, value.a)):
                    if isinstance(own, ir.TensorLoad) and own.source.same_as(stage.buffer):
                        return name, other
        raise RowwiseError("has a reduction other than sum, max and min")

    # --- expressions -----------------------------------------------------------------------------------------------

    def _column(self, e: Any) -> Any:
        """An index within a row, which must not depend on the number of rows."""
        found = [self._index(analyzer.simplify(e)) for analyzer in self._analyzers]
        if any(other != found[0] for other in found):
            raise RowwiseError(_ON_ROWS)
        return found[0]

    def _index(self, e: Any) -> Any:
        """An index that does not mention rows."""
        if isinstance(e, tirx.IntImm):
            return int(e)
        if isinstance(e, tirx.Var):
            for var, number in self._axes:
                if e.same_as(var):
                    return ["x", number]
            raise RowwiseError("depends on the number or the position of token rows in the batch")
        if isinstance(e, prim.Cast):
            return self._index(e.value)
        if type(e) in _BINARY:
            return [_BINARY[type(e)], self._index(e.a), self._index(e.b)]
        if _is_select(e):
            condition, x, y = _select_parts(e)
            if type(condition) in _COMPARE:
                name, swap = _COMPARE[type(condition)]
                sides = [self._index(condition.a), self._index(condition.b)]
                return ["select", [name, *(sides[::-1] if swap else sides)], self._index(x), self._index(y)]
        raise RowwiseError(f"reads by the index {e}, which is not computed from constants and axes")

    def _row_index(self, e: Any) -> None:
        """Raises RowwiseError unless `e` equals the row that the stage writes, for any number of rows."""
        own = self._stage_now.row_var
        for analyzer in self._analyzers:
            found = analyzer.simplify(e)
            if own is None or not (isinstance(found, tirx.Var) and found.same_as(own)):
                raise RowwiseError("mixes token rows: a row of its result reads other rows")

    def _load(self, e: Any) -> list[Any]:
        buffer = e.source
        for number, param in enumerate(self.params[: self.num_inputs]):
            if not param.same_as(buffer):
                continue
            if number in self.constants:
                value = self.constants[number]
                return ["const", float(value)] if _kind(buffer) == "float" else ["int", int(value)]
            axis = _row_axis(buffer.shape, self.rows)
            offset: Any = None
            for position, (index, extent) in enumerate(zip(e.indices, buffer.shape, strict=True)):
                if position == axis:
                    self._row_index(index)
                else:
                    offset = index if offset is None else offset * extent + index
            where = 0 if offset is None else self._column(offset)
            return ["load", self.kept_inputs.index(number), where]
        writer = self._writer(buffer)
        if writer is None:
            raise RowwiseError("reads a tensor before it is written")
        row = self.stages[writer].row
        indices = []
        for position, index in enumerate(e.indices):
            if position == row:
                self._row_index(index)
            else:
                indices.append(self._column(index))
        return ["stage", writer, indices]

    def _value(self, e: Any) -> Any:
        if isinstance(e, ir.TensorLoad):
            return self._load(e)
        if isinstance(e, tirx.FloatImm):
            return ["const", float(e.value)]
        dtype = str(e.ty)
        if dtype not in _KINDS:
            raise RowwiseError(f"computes {dtype} values; {_FLOATS}, int32 and bool are supported")
        kind = _KINDS[dtype]
        if isinstance(e, tirx.IntImm):
            return ["int", int(e)] if kind == "int" else ["ne", ["int", int(e)], ["int", 0]]
        if kind == "int" and not _has_load(e):
            if _mentions(e, self.rows):
                raise RowwiseError(_ON_ROWS)
            return ["index", self._column(e)]
        if isinstance(e, prim.Cast):
            return self._cast(e, dtype)
        if _is_select(e):
            return ["select", *(self._value(part) for part in _select_parts(e))]
        if type(e) in _COMPARE:
            name, swap = _COMPARE[type(e)]
            sides = [self._value(e.a), self._value(e.b)]
            return [name, *(sides[::-1] if swap else sides)]
        if isinstance(e, (prim.And, prim.Or)):
            return ["and" if isinstance(e, prim.And) else "or", self._value(e.a), self._value(e.b)]
        if isinstance(e, prim.Not):
            return ["not", self._value(e.a)]
        if isinstance(e, prim.Div) and kind == "float":
            return ["div", self._value(e.a), self._value(e.b)]
        if type(e) in _BINARY:
            name = _BINARY[type(e)]
            if kind == "int":
                name = f"int_{name}"
            elif name.startswith("floor") or kind == "bool":
                raise RowwiseError(f"computes {name} of {dtype} values")
            return [name, self._value(e.a), self._value(e.b)]
        if isinstance(e, ir.Call):
            return self._call(e, kind)
        raise RowwiseError(f"computes {type(e).__name__}, which has no vector form")

    def _cast(self, e: Any, dtype: str) -> Any:
        value, source = self._value(e.value), str(e.value.ty)
        forms: dict[tuple[str, str], Callable[[Any], Any]] = {
            ("float", "float"): lambda v: (
                [f"to_{DTYPES[dtype]}", v] if DTYPES[dtype] in HALVES and source != dtype else v
            ),
            ("int", "int"): lambda v: v,
            ("bool", "bool"): lambda v: v,
            ("int", "float"): lambda v: ["float_of_int", v],
            ("float", "int"): lambda v: ["int_of_float", v],
            ("bool", "float"): lambda v: ["bool_to_float", v],
            ("bool", "int"): lambda v: ["bool_to_int", v],
            ("int", "bool"): lambda v: ["ne", v, ["int", 0]],
            ("float", "bool"): lambda v: ["ne", v, ["const", 0.0]],
        }
        return forms[_KINDS[source], _KINDS[dtype]](value)

    def _call(self, e: Any, kind: str) -> Any:
        name = str(e.op.name).split(".")[-1]
        if kind == "float":
            if name in _UNARY:
                return [_UNARY[name], self._value(e.args[0])]
            if name == "rsqrt":
                return ["div", ["const", 1.0], ["sqrt", self._value(e.args[0])]]
            if name in ("pow", "power"):
                return self._power(e.args[0], e.args[1])
        raise RowwiseError(f"calls {name}, which has no vector form")

    def _power(self, base: Any, exponent: Any) -> Any:
        """Powers by multiplication: integer and half-integer exponents up to 8."""
        power = self._value(exponent)
        if power[0] == "const" and float(power[1] * 2).is_integer() and abs(power[1]) <= 8:
            x, size = self._value(base), abs(power[1])
            factors = [x] * int(size) + ([["sqrt", x]] if size % 1 else [])
            result = factors[0] if factors else ["const", 1.0]
            for factor in factors[1:]:
                result = ["mul", result, factor]
            return result if power[1] >= 0 else ["div", ["const", 1.0], result]
        raise RowwiseError("raises to a power that is not a constant whole or half number of at most 8")


def _sizes(shape: Sequence[Any]) -> str:
    """A shape for error texts, as in [s0 + 1, 60]."""
    return re.sub(r"T\.int64\((-?\d+)\)", r"\1", f"[{', '.join(map(str, shape))}]")


def _like(var: Any, value: int) -> Any:
    return tirx.IntImm(str(var.ty), value)


def _kind(buffer: Any) -> str:
    dtype = str(buffer.dtype)
    if dtype not in _KINDS:
        raise RowwiseError(f"has a {dtype} tensor; {_FLOATS}, int32 and bool are supported")
    return _KINDS[dtype]


def _has_load(e: Any) -> bool:
    return _some(e, lambda part: isinstance(part, ir.TensorLoad))


def _is_select(e: Any) -> bool:
    return isinstance(e, prim.Select) or (isinstance(e, ir.Call) and str(e.op.name).endswith(".if_then_else"))


def _select_parts(e: Any) -> tuple[Any, Any, Any]:
    return (e.condition, e.true_value, e.false_value) if isinstance(e, prim.Select) else tuple(e.args)


def row_program(
    func: tirx.PrimFunc, num_outputs: int = 1, constants: Mapping[int, float] | None = None
) -> dict[str, Any]:
    """The row program of a legalised function whose last `num_outputs` parameters are outputs.

    constants: values of scalar parameters by position. Raises RowwiseError naming what is not a function of one row.
    """
    return _Converter(func, num_outputs, constants or {}).program()


def is_cheap_to_join(program: Mapping[str, Any]) -> bool:
    """Whether a kernel may fuse the function with its neighbours: no stage rereads its inputs many times."""
    return all(not stage["reduce"] or prod(stage["shape"]) <= _MAX_JOINED_SUMS for stage in program["stages"])
