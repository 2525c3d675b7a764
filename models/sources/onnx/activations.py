"""Identifies the activation that a scalar function is, by evaluating it and comparing with those llmc has."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from llmc.models.config import Activation
from llmc.models.convert import Array
from llmc.models.sources.onnx.rows import Flat, FlatPart, Term, Unrecognised
from llmc.models.sources.onnx.terms import Elementwise, parts_of

_CLOSE = 9e-5
"""gelu and its approximations differ by at least 2e-4. Constants in f16, as the root of 2, change gelu by 7e-5."""
_erf = np.vectorize(math.erf)


def _sigmoid(x: Array) -> Array:
    y: Array = 1 / (1 + np.exp(-x))
    return y


def _gelu(x: Array) -> Array:
    y: Array = 0.5 * x * (1 + _erf(x / math.sqrt(2)))
    return y


def _gelu_tanh(x: Array) -> Array:
    y: Array = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return y


_OPS: Mapping[str, Callable[..., Array]] = {
    "multiply": np.multiply,
    "tanh": np.tanh,
    "erf": _erf,
    "exp": np.exp,
    "log": np.log,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "reciprocal": lambda x: 1 / x,
    "sigmoid": _sigmoid,
    "softplus": lambda x: np.log1p(np.exp(x)),
    "relu": lambda x: np.maximum(x, 0),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": lambda x: x * _sigmoid(x),
}
ACTIVATIONS: Mapping[Activation, Callable[[Array], Array]] = {
    "silu": lambda x: x * _sigmoid(x),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": lambda x: x * _sigmoid(1.702 * x),
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
}


@dataclass(frozen=True, eq=False)
class Activated:
    """The activated input of a feed-forward block's last layer. inner: elements that the activation is applied to. up:
    elements that multiply its result; None for none. Both without a factor."""

    activation: Activation
    inner: FlatPart
    up: FlatPart | None


def read_activated(flat: Flat) -> Activated:
    """Raises Unrecognised for a function that llmc does not have."""
    leaves: list[FlatPart] = []
    _collect(flat, leaves)
    grid = np.linspace(-7.0, 7.0, 141)
    if len(leaves) == 1:
        return Activated(_named(_value(flat, leaves, [grid])), leaves[0], None)
    if len(leaves) != 2:
        raise Unrecognised(f"computes a function of {len(leaves)} numbers in a feed-forward block")
    ones = np.ones_like(grid)
    for gate, up in ((0, 1), (1, 0)):
        at = [grid, grid]
        at[up] = ones
        curve = _value(flat, leaves, at)
        at[up] = np.linspace(3.0, -2.0, len(grid))
        if np.allclose(_value(flat, leaves, at), curve * at[up], rtol=1e-6, atol=1e-6):
            try:
                return Activated(_named(curve), leaves[gate], leaves[up])
            except Unrecognised:
                continue
    raise Unrecognised("has a feed-forward block with a gate that llmc does not know")


def _named(curve: Array) -> Activation:
    grid = np.linspace(-7.0, 7.0, len(curve))
    for name, function in ACTIVATIONS.items():
        if np.allclose(curve, function(grid), rtol=0, atol=_CLOSE):
            return name
    raise Unrecognised(f"has an activation that is none of {', '.join(ACTIVATIONS)}")


def _collect(flat: Flat, leaves: list[FlatPart]) -> None:
    """Collects the layer elements that a function depends on."""
    for part in parts_of(flat):
        if isinstance(part.term, Elementwise):
            _check_plain(part)
            for arg in part.term.args:
                _collect(arg, leaves)
        elif not any(_same(part, leaf) for leaf in leaves):
            leaves.append(part)


def _check_plain(part: FlatPart) -> None:
    if not part.is_whole or part.factor is None:
        raise Unrecognised("computes with elements of a row in another order")


def _same(a: FlatPart, b: FlatPart) -> bool:
    term: Term = b.term
    return a.term is term and np.array_equal(a.idx, b.idx)


def _value(flat: Flat, leaves: list[FlatPart], at: list[Array]) -> Array:
    """Evaluates the function for one element at given values of the leaves."""
    total: Array = np.zeros(len(at[0]))
    if flat.const is not None:
        if (flat.const != flat.const.flat[0]).any():
            raise Unrecognised("adds other numbers to some elements of a feed-forward block than to others")
        total = total + float(flat.const.flat[0])
    for part in parts_of(flat):
        if part.factor is None:
            raise Unrecognised("multiplies elements of a feed-forward block by several numbers")
        if isinstance(part.term, Elementwise):
            args = [_value(arg, leaves, at) for arg in part.term.args]
            if part.term.op not in _OPS:
                raise Unrecognised(f"computes {part.term.op} in a feed-forward block")
            with np.errstate(all="ignore"):
                value = _OPS[part.term.op](*args)
        else:
            value = at[next(i for i, leaf in enumerate(leaves) if _same(part, leaf))]
        total = total + part.factor * value
    return total
