"""Evaluates an imported graph symbolically: values are what they are for a token (`rows.py`), not numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import tvm
from tvm import relax

from llmc.models.brief import brief
from llmc.models.convert import Array
from llmc.models.errors import ModelError
from llmc.models.sources.onnx.file import OnnxFile
from llmc.models.sources.onnx.importer import Given, Imported, Table
from llmc.models.sources.onnx.probe import Probe
from llmc.models.sources.onnx.rows import Matrix, Rows, Unrecognised, concatenated, new_rows
from llmc.models.sources.onnx.scores import Scores, attended, scores_of
from llmc.models.sources.onnx.terms import (
    Cache,
    Embedding,
    First,
    Past,
    function_of,
    linear,
    mean,
    normed,
    power,
    product,
    reciprocal,
    scaled,
    shifted,
)


@dataclass(frozen=True, eq=False)
class Known:
    """Known values. name: in the graph, if they have one. table: rows of a matrix that they are. ids: the input whose
    ids they are."""

    array: Array
    name: str = ""
    table: Table | None = None
    ids: str | None = None


@dataclass(frozen=True, eq=False)
class NotANumber:
    """Marks where attention weights are NaN."""

    of: Scores


BROKEN = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""Exceptions that a graph no exporter writes may cause."""
Value = Any
"""Known, Rows, Scores, Matrix, NotANumber, or a tuple of them."""
_UNARY = ("tanh", "erf", "sigmoid", "exp", "log", "abs", "nn.gelu", "nn.gelu_tanh", "nn.silu", "nn.relu", "softplus")
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_NUMPY: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "power": np.power,
    "sqrt": np.sqrt,
    "negative": np.negative,
    "maximum": np.maximum,
    "minimum": np.minimum,
}


class Evaluation:
    """The values of an imported graph. Raises ModelError naming the node of an unrecognised value."""

    def __init__(self, file: OnnxFile, imported: Imported) -> None:
        self._file, self._imported = file, imported
        self.probe: Probe = imported.inputs.probe
        # By variable name, which is unique.
        self._values: dict[str, Value] = {}
        for var in imported.function.params:
            self._values[var.name] = self._given(imported.given[var.name], _shape(var))
        self._run()

    def output(self, name: str) -> Value:
        """The value of an output of the graph."""
        return self._values[self._imported.outputs[name].name]

    def _given(self, given: Given, shape: tuple[int, ...]) -> Value:
        if given.matrix is not None:
            return Matrix((shape[0], shape[1]), given.matrix)
        if given.past is not None:
            return self._past(given.past, shape)
        assert given.array is not None
        return Known(given.array, given.name, given.table, given.ids)

    def _past(self, name: str, shape: tuple[int, ...]) -> Rows:
        probe = self.probe
        axis = self._imported.inputs.axes[name]
        width = int(np.prod(shape)) // (probe.batch * probe.past)
        tok = np.arange(probe.batch * probe.past, dtype=np.int32)
        inner = [dim for i, dim in enumerate(shape) if i not in (0, axis)]
        rows = new_rows(Past(width, name), tok, "cached")
        whole = rows.moved(lambda array: array.reshape(probe.batch, probe.past, *inner))
        return whole.moved(lambda array: np.moveaxis(array, 1, axis))

    def _run(self) -> None:
        for block in self._imported.function.body.blocks:
            for binding in block.bindings:
                try:
                    self._values[binding.var.name] = self._value(binding.value, binding.var)
                except Unrecognised as error:
                    called = self._imported.called(binding.var.name)
                    raise ModelError(f"{self._file.path}: {called} {error}, which no model of llmc does") from None
                except BROKEN as error:
                    called = self._imported.called(binding.var.name)
                    raise ModelError(f"{self._file.path}: {called} cannot be followed: {brief(str(error))}") from error

    def _value(self, expr: Any, var: Any = None) -> Value:
        if isinstance(expr, relax.Var):
            return self._values[expr.name]
        if isinstance(expr, tvm.ir.GenericConst):
            return Known(expr.value.numpy())
        if isinstance(expr, relax.Tuple):
            return tuple(self._value(field) for field in expr.fields)
        if isinstance(expr, relax.TupleGetItem):
            return self._value(expr.tuple_value)[expr.index]
        if isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op):
            return self._call(expr, expr if var is None else var)
        raise Unrecognised("is none of TVM's operators")

    def _call(self, call: Any, typed: Any) -> Value:
        name = str(call.op.name).removeprefix("relax.")
        if name in ("reshape", "expand_dims", "squeeze", "broadcast_to"):
            return self._reshaped(self._value(call.args[0]), _shape(typed), name)
        if name == "strided_slice":
            return self._sliced(call)
        if name == "split":
            return self._split(call)
        values = [self._value(arg) for arg in call.args if not isinstance(arg, relax.ShapeExpr)]
        method = getattr(self, f"_{name.replace('.', '_')}", None)
        if method is not None:
            return method(call, *values)
        if all(isinstance(value, Known) for value in values) and name in _NUMPY:
            with np.errstate(all="ignore"):
                return Known(_NUMPY[name](*(value.array for value in values)))
        if name in _UNARY and isinstance(values[0], Rows):
            return function_of(name.removeprefix("nn."), values[0])
        raise Unrecognised(f"computes {name} of {_kinds(values)}")

    # Data movement

    def _reshaped(self, x: Value, shape: tuple[int, ...], name: str) -> Value:
        function = np.broadcast_to if name == "broadcast_to" else np.reshape
        if isinstance(x, Known):
            return Known(function(x.array, shape), x.name if x.array.shape == shape else "")
        if isinstance(x, Scores):
            return self._scores_in(x, shape)
        if isinstance(x, Rows):
            return x if x.shape == shape else x.moved(lambda array: function(array, shape))
        raise Unrecognised(f"reshapes {_kinds([x])}")

    def _scores_in(self, x: Scores, shape: tuple[int, ...]) -> Scores:
        """Texts and heads on one axis, or on two."""
        if shape[-2:] != x.shape[-2:] or int(np.prod(shape)) != int(np.prod(x.shape)):
            raise Unrecognised("reshapes scores of attention")
        return replace(x, shape=shape, mask=None if x.mask is None else x.mask.reshape(shape))

    def _permute_dims(self, call: Any, x: Value) -> Value:
        axes = None if call.attrs.axes is None else [int(axis) for axis in call.attrs.axes]
        if isinstance(x, Matrix):
            return x.transposed if axes in (None, [1, 0]) else x
        if isinstance(x, Known):
            return Known(np.transpose(x.array, axes))
        if isinstance(x, Rows):
            return x.moved(lambda array: np.transpose(array, axes))
        raise Unrecognised(f"transposes {_kinds([x])}")

    def _sliced(self, call: Any) -> Value:
        x = self._value(call.args[0])
        axes, begins, ends, *strides = ([_number(v) for v in _fields(arg)] for arg in call.args[1:] if arg is not None)
        if not isinstance(x, (Known, Rows)):
            raise Unrecognised(f"takes a part of {_kinds([x])}")
        steps = strides[0] if strides else [1] * len(axes)
        shape = x.array.shape if isinstance(x, Known) else x.shape
        index = [slice(None)] * len(shape)
        for axis, begin, end, step in zip(axes, begins, ends, steps, strict=True):
            # As in ONNX: an end before the first element slices backwards through it.
            index[axis] = slice(begin, None if step < 0 and end < -shape[axis] else end, step)
        return self._taken(x, tuple(index))

    def _split(self, call: Any) -> Value:
        x, axis = self._value(call.args[0]), int(call.attrs.axis)
        if not isinstance(x, Rows):
            raise Unrecognised(f"splits {_kinds([x])}")
        axis %= len(x.shape)
        parts = call.attrs.indices_or_sections
        if isinstance(parts, int) or hasattr(parts, "value"):
            count = _number(parts)
            size = -(-x.shape[axis] // count)
            bounds = [min(i * size, x.shape[axis]) for i in range(count + 1)]
        else:
            bounds = [0, *(_number(part) for part in parts), x.shape[axis]]
        index = (slice(None),) * axis
        return tuple(self._taken(x, (*index, slice(a, b))) for a, b in pairwise(bounds))

    def _taken(self, x: Known | Rows, index: tuple[slice, ...]) -> Value:
        if isinstance(x, Known):
            return Known(x.array[index])
        return x.moved(lambda array: array[index])

    def _concat(self, call: Any, parts: tuple[Value, ...]) -> Value:
        axis = int(call.attrs.axis)
        if all(isinstance(part, Known) for part in parts):
            return Known(np.concatenate([part.array for part in parts], axis))
        if not all(isinstance(part, Rows) for part in parts):
            raise Unrecognised(f"joins {_kinds(parts)}")
        spaces = [part.space for part in parts]
        if spaces == ["cached", "new"]:
            return self._cache(parts[0], parts[1], axis)
        if len(set(spaces)) != 1:
            raise Unrecognised("joins rows of the cache and others in another order than that of the text")
        return concatenated(parts, axis, parts[0].space)

    def _cache(self, past: Rows, new: Rows, axis: int) -> Rows:
        """Rows of the cache, followed by those of this step."""
        probe, term = self.probe, past.flat.only
        if not isinstance(term, Past) or new.flat.size != past.flat.size:
            raise Unrecognised("joins rows of the cache and others that are not alike")
        cache = Cache(past.flat.size, term, new.flat)
        made = new.of(cache)

        def in_text(tok: Array, count: int, first: int) -> Array:
            places: Array = tok // count * probe.keys + first + tok % count
            return places

        rows = (
            Rows(in_text(past.tok, probe.past, 0), past.of(cache).parts, None, "all"),
            Rows(in_text(made.tok, probe.tokens, probe.past), made.parts, None, "all"),
        )
        return concatenated(rows, axis, "all")

    def _take(self, call: Any, x: Value, indices: Value) -> Value:
        axis = int(call.attrs.axis or 0)
        if not isinstance(indices, Known):
            raise Unrecognised("takes rows that depend on what was computed")
        if isinstance(x, Matrix) and indices.ids and not x.turned and axis == 0:
            return self._embedded(x, indices)
        if isinstance(x, Known):
            return Known(np.take(x.array, indices.array, axis))
        if not isinstance(x, Rows):
            raise Unrecognised(f"takes rows of {_kinds([x])}")
        taken = x.moved(lambda array: np.take(array, indices.array, axis))
        tokens = len(np.unique(taken.tok))
        if tokens == self.probe.batch and len(np.unique(x.tok)) > tokens and x.space == "new":
            return self._first(taken)
        return taken

    def _first(self, rows: Rows) -> Rows:
        """Rows of one token of each text, which must be the first."""
        if (rows.tok % self.probe.tokens).any():
            raise Unrecognised("takes the row of a token that is not the first")
        return rows.of(First(rows.flat.size, rows.flat))

    def _embedded(self, weight: Matrix, ids: Known) -> Rows:
        probe = self.probe
        if ids.array.size != probe.batch * probe.tokens:
            raise Unrecognised("embeds some tokens of the text")
        tok = np.arange(ids.array.size, dtype=np.int32).reshape(ids.array.shape)
        by: Any = ids.ids
        return new_rows(Embedding(weight.shape[1], weight, by), tok)

    # Arithmetic

    def _astype(self, call: Any, x: Value) -> Value:
        """Intermediate rounding is ignored: the artifact has its own."""
        dtype = str(call.attrs.dtype)
        if isinstance(x, Known):
            return Known(x.array.astype(dtype), x.name)
        if dtype not in _FLOATS:
            raise Unrecognised(f"rounds {_kinds([x])} to {dtype}")
        return x

    def _add(self, _: Any, x: Value, y: Value) -> Value:
        if isinstance(x, Known) and isinstance(y, Known):
            return Known(x.array + y.array)
        if isinstance(x, Known):
            x, y = y, x
        if isinstance(x, Rows) and isinstance(y, Known):
            return self._plus_known(x, y)
        if isinstance(x, Rows) and isinstance(y, Rows):
            return x.plus(y)
        if isinstance(x, Scores) and isinstance(y, Known):
            return x if y.array.size == 1 and not y.array.any() else x.masked(y.array, y.name)
        raise Unrecognised(f"adds {_kinds([x, y])}")

    def _plus_known(self, x: Rows, y: Known) -> Rows:
        if y.table is None:
            return shifted(x, y.array)
        return x.plus(self._table_rows(y.table, x))

    def _table_rows(self, table: Table, x: Rows) -> Rows:
        """Rows of a matrix selected by token positions, or one row for all."""
        probe, rows = self.probe, self._file.shape(table.name)
        weight = Matrix((rows[0], rows[1]), table.name)
        shape = (probe.batch, probe.tokens)
        try:
            indices = np.broadcast_to(table.indices, shape)
        except ValueError:
            raise Unrecognised("adds rows of a table that has no row for each token") from None
        valid = probe.seen(probe.past > 0)[:, probe.past :]
        first = indices[0] - (probe.past + np.arange(probe.tokens))
        if (first == first[0]).all():
            term = Embedding(rows[1], weight, "position_ids", int(first[0]))
        elif not indices[valid].any():
            term = Embedding(rows[1], weight, "token_type_ids")
        else:
            raise Unrecognised("adds rows of a table that are not those of positions")
        tok = np.arange(probe.batch * probe.tokens, dtype=np.int32).reshape(shape)
        made = new_rows(term, tok)
        return made if made.shape == x.shape else made.moved(lambda array: array.reshape(x.shape))

    def _subtract(self, call: Any, x: Value, y: Value) -> Value:
        if isinstance(x, (Rows, Known)) and isinstance(y, Rows):
            return self._add(call, x, y.scaled(np.array(-1, np.float32)))
        if isinstance(y, Known):
            return self._add(call, x, Known(-y.array))
        raise Unrecognised(f"takes {_kinds([y])} off {_kinds([x])}")

    def _negative(self, _: Any, x: Value) -> Value:
        if isinstance(x, Known):
            return Known(-x.array)
        if isinstance(x, Rows):
            return x.scaled(np.array(-1, np.float32))
        raise Unrecognised(f"negates {_kinds([x])}")

    def _multiply(self, _: Any, x: Value, y: Value) -> Value:
        if isinstance(x, Known) and isinstance(y, Known):
            return Known(x.array * y.array)
        if isinstance(x, Known):
            x, y = y, x
        if isinstance(x, Rows) and isinstance(y, Known):
            return scaled(x, y.array)
        if isinstance(x, Rows) and isinstance(y, Rows):
            return product(x, y)
        if isinstance(x, Scores) and isinstance(y, Known):
            return x.times(y.array)
        raise Unrecognised(f"multiplies {_kinds([x, y])}")

    def _divide(self, call: Any, x: Value, y: Value) -> Value:
        with np.errstate(all="ignore"):
            if isinstance(y, Known):
                if isinstance(x, Known):
                    return Known(x.array / y.array)
                return self._multiply(call, x, Known(np.float32(1) / y.array))
        if isinstance(y, Rows) and isinstance(x, Known):
            return scaled(reciprocal(y), x.array)
        if isinstance(y, Rows) and isinstance(x, Rows):
            return product(x, reciprocal(y))
        raise Unrecognised(f"divides {_kinds([x])} by {_kinds([y])}")

    def _power(self, _: Any, x: Value, y: Value) -> Value:
        if isinstance(x, Known) and isinstance(y, Known):
            return Known(x.array**y.array)
        if isinstance(x, Rows) and isinstance(y, Known) and y.array.size == 1:
            return power(x, float(y.array.reshape(())))
        raise Unrecognised(f"raises {_kinds([x])} to a power")

    def _sqrt(self, _: Any, x: Value) -> Value:
        return Known(np.sqrt(x.array)) if isinstance(x, Known) else power(_rows(x, "takes the root of"), 0.5)

    def _rsqrt(self, _: Any, x: Value) -> Value:
        return power(_rows(x, "takes the root of"), -0.5)

    def _tanh(self, _: Any, x: Value) -> Value:
        return x.capped() if isinstance(x, Scores) else function_of("tanh", _rows(x, "takes tanh of"))

    def _mean(self, call: Any, x: Value) -> Value:
        axes = [int(axis) for axis in call.attrs.axis or ()]
        if len(axes) != 1:
            raise Unrecognised("takes a mean over several axes")
        return mean(_rows(x, "takes the mean of"), axes[0], bool(call.attrs.keepdims))

    def _maximum(self, _: Any, x: Value, y: Value) -> Value:
        return self._bounded("maximum", x, y)

    def _minimum(self, _: Any, x: Value, y: Value) -> Value:
        return self._bounded("minimum", x, y)

    def _bounded(self, op: str, x: Value, y: Value) -> Value:
        """A bound that no number of a model reaches is ignored."""
        if isinstance(x, Known) and isinstance(y, Known):
            return Known(_NUMPY[op](x.array, y.array))
        if isinstance(x, Known):
            x, y = y, x
        if isinstance(y, Known) and y.array.size == 1 and isinstance(x, (Scores, Rows)):
            bound = float(y.array.reshape(()))
            if (bound <= -6e4) if op == "maximum" else (bound >= 6e4):
                return x
            if op == "maximum" and bound == 0.0 and isinstance(x, Rows):
                return function_of("relu", x)
        raise Unrecognised(f"bounds {_kinds([x, y])}")

    # Norms and attention

    def _nn_layer_norm(self, call: Any, x: Value, weight: Value, bias: Value) -> Value:
        return self._norm("layer", call, x, weight, bias)

    def _nn_rms_norm(self, call: Any, x: Value, weight: Value) -> Value:
        return self._norm("rms", call, x, weight, None)

    def _norm(self, kind: Any, call: Any, x: Value, weight: Value, bias: Value | None) -> Value:
        rows = _rows(x, "norms")
        axes = [int(axis) % len(rows.shape) for axis in call.attrs.axes]
        known = isinstance(weight, Known) and (bias is None or isinstance(bias, Known))
        if axes != [len(rows.shape) - 1] or not known:
            raise Unrecognised("norms over several axes, or by weights that are computed")
        return normed(kind, rows, weight.array, None if bias is None else bias.array, float(call.attrs.epsilon))

    def _matmul(self, _: Any, x: Value, y: Value) -> Value:
        if isinstance(y, Known) and y.array.ndim == 2:
            y = Matrix((y.array.shape[0], y.array.shape[1]), None, y.array)
        if isinstance(x, Rows) and isinstance(y, Matrix):
            return linear(x, y)
        if isinstance(x, Rows) and isinstance(y, Rows):
            return scores_of(x, y, self.probe.batch)
        if isinstance(x, Scores) and isinstance(y, Rows):
            return attended(x, y)
        raise Unrecognised(f"multiplies {_kinds([x, y])} as matrices")

    def _nn_softmax(self, call: Any, x: Value) -> Value:
        if not isinstance(x, Scores) or int(call.attrs.axis) not in (-1, len(x.shape) - 1):
            raise Unrecognised(f"takes softmax of {_kinds([x])}")
        return x.weights()

    def _isnan(self, _: Any, x: Value) -> Value:
        if isinstance(x, Scores) and x.softmax:
            return NotANumber(x)
        raise Unrecognised(f"looks for numbers that are none in {_kinds([x])}")

    def _where(self, _: Any, condition: Value, x: Value, y: Value) -> Value:
        if isinstance(condition, NotANumber) and isinstance(x, Known) and not x.array.any() and y is condition.of:
            # For tokens that see no key; none exist here.
            return y
        if isinstance(condition, Known):
            for scores, other, keep in ((x, y, True), (y, x, False)):
                blocks = isinstance(other, Known) and other.array.size == 1 and float(other.array.reshape(())) <= -1e4
                if isinstance(scores, Scores) and blocks:
                    return scores.masked(condition.array, condition.name, keep)
            if all(isinstance(value, Known) for value in (x, y)):
                return Known(np.where(condition.array, x.array, y.array))
        raise Unrecognised(f"chooses between {_kinds([x, y])}")


def _rows(value: Value, does: str) -> Rows:
    if isinstance(value, Rows):
        return value
    raise Unrecognised(f"{does} {_kinds([value])}")


_WORDS = {
    Known: "known values",
    Rows: "rows of tokens",
    Matrix: "a weight",
    NotANumber: "where numbers are none",
    tuple: "several values",
}


def _kinds(values: Sequence[Value]) -> str:
    """Kinds of values, in words."""
    return " and ".join(
        ("weights of attention" if value.softmax else "scores of attention")
        if isinstance(value, Scores)
        else _WORDS.get(type(value), type(value).__name__)
        for value in values
    )


def _shape(expr: Any) -> tuple[int, ...]:
    return tuple(int(dim) for dim in expr.ty.shape)


def _fields(expr: Any) -> Sequence[Any]:
    return expr.fields if isinstance(expr, relax.Tuple) else list(expr)


def _number(expr: Any) -> int:
    while hasattr(expr, "value"):
        expr = expr.value
    return int(expr)
