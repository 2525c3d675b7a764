"""Kinds of `Term`, and functions on tokens, in which norms are recognised."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from llmc.models.convert import Array
from llmc.models.sources.onnx.rows import Flat, FlatPart, Matrix, Rows, Term, Unrecognised, new_rows, together


@dataclass(frozen=True, eq=False)
class Embedding(Term):
    """Rows of a matrix [rows, width], selected by token ids, type ids, or positions, which begin at row `first`."""

    weight: Matrix
    by: Literal["input_ids", "token_type_ids", "position_ids"]
    first: int = 0


@dataclass(frozen=True, eq=False)
class Linear(Term):
    """x times a matrix [elements of x, width], plus a bias float32 [width]."""

    x: Flat
    weight: Matrix
    bias: Array | None = None


@dataclass(frozen=True, eq=False)
class Elementwise(Term):
    """An elementwise function."""

    op: str
    args: tuple[Flat, ...]


@dataclass(frozen=True, eq=False)
class Mean(Term):
    """Means of groups of `size` consecutive elements."""

    x: Flat
    size: int


@dataclass(frozen=True, eq=False)
class Norm(Term):
    """A norm of each of `groups` equal groups, times a weight, plus a bias; both float32 [width] or None."""

    kind: Literal["rms", "layer"]
    x: Flat
    eps: float
    groups: int
    weight: Array | None = None
    bias: Array | None = None


@dataclass(frozen=True, eq=False)
class Past(Term):
    """Rows of earlier tokens in an input. name: of the input."""

    name: str


@dataclass(frozen=True, eq=False)
class Cache(Term):
    """Rows of earlier tokens, followed by new ones."""

    past: Past
    new: Flat


@dataclass(frozen=True, eq=False)
class First(Term):
    """The row of a text's first token."""

    x: Flat


def linear(x: Rows, weight: Matrix) -> Rows:
    """x [..., K] times [K, N]."""
    tok = x.tok[..., 0]
    flat = x.flat
    if (x.tok != x.tok[..., :1]).any() or flat.size != weight.shape[0]:
        raise Unrecognised("multiplies a matrix by parts of rows")
    return new_rows(Linear(weight.shape[1], flat, weight), tok)


def function_of(op: str, *args: Rows) -> Rows:
    """An elementwise function."""
    if len(args) == 2:
        args = together(*args)
    flats = tuple(arg.flat for arg in args)
    return args[0].of(Elementwise(flats[0].size, op, flats))


def shifted(x: Rows, by: Array) -> Rows:
    """x plus known numbers, which become the bias of a linear or a norm."""
    total, only = x.shifted(by), x.flat.only
    if (isinstance(only, Linear) or (isinstance(only, Norm) and only.weight is not None)) and only.bias is None:
        const = total.flat.const
        if total.shape == x.shape and const is not None and const.ndim == 1:
            return x.of(replace(only, bias=const))
    return total


def scaled(x: Rows, by: Array) -> Rows:
    """x times known numbers, which become a norm's weight."""
    result, only = x.scaled(by), x.flat.only
    if isinstance(only, Norm) and only.weight is None and only.bias is None and by.size > 1:
        coef = result.flat.parts[0].coef
        if result.shape == x.shape and coef.ndim == 1:
            return x.of(replace(only, weight=coef))
    return result


def mean(x: Rows, axis: int, keepdims: bool) -> Rows:
    """Mean over the last axis, within one token."""
    if axis not in (-1, x.tok.ndim - 1) or (x.tok != x.tok[..., :1]).any():
        raise Unrecognised("takes a mean over several tokens")
    size = x.shape[-1]
    groups = x.moved(lambda array: array[..., :1])
    result = groups.of(Mean(x.flat.size // size, x.flat, size))
    return result if keepdims else result.moved(lambda array: array[..., 0])


def reciprocal(x: Rows) -> Rows:
    only = x.flat.only
    if isinstance(only, Elementwise) and only.op == "sqrt":
        return x.of(replace(only, op="rsqrt"))
    return function_of("reciprocal", x)


def product(x: Rows, y: Rows) -> Rows:
    for a, b in ((x, y), (y, x)):
        found = _normed(a, b)
        if found is not None:
            return found
    return function_of("multiply", x, y)


def power(x: Rows, exponent: float) -> Rows:
    match exponent:
        case 2.0:
            return product(x, x)
        case 3.0:
            return product(x, product(x, x))
        case 0.5:
            return function_of("sqrt", x)
        case -0.5:
            return reciprocal(function_of("sqrt", x))
        case -1.0:
            return reciprocal(x)
    raise Unrecognised(f"raises to the power of {exponent:g}")


def _normed(x: Rows, factor: Rows) -> Rows | None:
    """x divided by its root mean square; None unless the factor is that reciprocal root."""
    if x.space != factor.space or len(factor.parts) != 1 or factor.const is not None:
        return None
    root = factor.parts[0].term
    if not isinstance(root, Elementwise) or root.op != "rsqrt":
        return None
    found = _mean_square(root.args[0])
    if found is None:
        return None
    size, eps, squared = found
    x, factor = together(x, factor)
    flat, (part,) = x.flat, factor.flat.parts
    if not squared.same(flat) or part.factor != 1.0 or not np.array_equal(part.idx, np.arange(flat.size) // size):
        return None
    centred = _less_mean(flat, size)
    norm = Norm(flat.size, "rms" if centred is None else "layer", flat if centred is None else centred, eps, root.width)
    return x.of(norm)


def _mean_square(flat: Flat) -> tuple[int, float, Flat] | None:
    """(elements per group, eps, operand) of a mean of squares plus a small number."""
    if len(flat.parts) != 1 or flat.parts[0].factor != 1.0 or not flat.parts[0].is_whole:
        return None
    mean_of = flat.parts[0].term
    if not isinstance(mean_of, Mean):
        return None
    square = mean_of.x.only
    if not isinstance(square, Elementwise) or square.op != "multiply" or not square.args[0].same(square.args[1]):
        return None
    eps = flat.const
    if eps is not None and (eps.ndim != 1 or (eps != eps[0]).any()):
        return None
    return mean_of.size, _decimal(0.0 if eps is None else eps[0]), square.args[0]


def _decimal(number: float | np.float32) -> float:
    """The shortest decimal that rounds to it, as somebody wrote it."""
    return float(str(np.float32(number)))


def _less_mean(flat: Flat, size: int) -> Flat | None:
    """The operand of a subtraction of its own mean, or None."""
    for part in flat.parts:
        rest = Flat(flat.size, tuple(p for p in flat.parts if p is not part), flat.const)
        if (
            isinstance(part.term, Mean)
            and part.factor == -1.0
            and part.term.size == size
            and np.array_equal(part.idx, np.arange(flat.size) // size)
            and part.term.x.same(rest)
        ):
            return rest
    return None


def normed(kind: Literal["rms", "layer"], x: Rows, weight: Array, bias: Array | None, eps: float) -> Rows:
    """A norm by a single operator, over the last axis."""
    if (x.tok != x.tok[..., :1]).any():
        raise Unrecognised("norms several tokens together")
    flat = x.flat
    found = scaled(x.of(Norm(flat.size, kind, flat, _decimal(eps), flat.size // x.shape[-1])), weight)
    return found if bias is None or not np.any(bias) else shifted(found, bias)


def parts_of(flat: Flat) -> tuple[FlatPart, ...]:
    """The non-zero parts."""
    return tuple(part for part in flat.parts if np.any(part.coef))
