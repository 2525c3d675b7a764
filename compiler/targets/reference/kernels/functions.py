"""Elementary functions of a float32, computed in float64 and rounded once; targets may have others (`computed_by`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.reference.kernels.frame import Expr, is_nan, let

_EXP_TERMS = 13
_LOG_TERMS = 12
_ROUNDER = 6755399441055744.0  # 1.5 · 2⁵²: a sum with it has no fraction bits


def _wide(value: Expr) -> Expr:
    return let(T.Cast("float64", value), "float64")


def _narrow(value: Expr) -> Expr:
    return let(T.Cast("float32", value), "float32")


def _exp64(x: Expr) -> Expr:
    """exp of a float64, clamped to ±700."""
    x = let(T.max(T.min(x, T.float64(700.0)), T.float64(-700.0)), "float64")
    sum_of = let(x * T.float64(1 / math.log(2)) + T.float64(_ROUNDER), "float64")
    whole = let(sum_of - T.float64(_ROUNDER), "float64")
    rest = let(x - whole * T.float64(math.log(2)), "float64")
    value = T.float64(1.0)
    for term in range(_EXP_TERMS, 0, -1):
        value = let(value * rest * T.float64(1 / term) + T.float64(1.0), "float64")
    exponent = T.shift_left(T.Cast("int64", whole) + T.int64(1023), T.int64(52))
    return let(value * T.reinterpret("float64", exponent), "float64")


def _keep_nan(x: Expr, value: Expr) -> Expr:
    return let(T.Select(is_nan(x), x, value), "float32")


def _exp(x: Expr) -> Expr:
    x = let(x, "float32")
    return _keep_nan(x, _narrow(_exp64(_wide(x))))


def _sigmoid(x: Expr) -> Expr:
    x = let(x, "float32")
    return _keep_nan(x, _narrow(T.float64(1.0) / (T.float64(1.0) + _exp64(-_wide(x)))))


def _tanh(x: Expr) -> Expr:
    x = let(x, "float32")
    power = _exp64(_wide(x) * T.float64(2.0))
    # For small x the quotient cancels; x − x³ / 3 is exact to float32 there.
    wide = _wide(x)
    small = wide - wide * wide * wide * T.float64(1 / 3)
    large = (power - T.float64(1.0)) / (power + T.float64(1.0))
    return _keep_nan(x, _narrow(T.Select(T.abs(wide) < T.float64(1e-3), small, large)))


def _log(x: Expr) -> Expr:
    """Natural logarithm: −inf at 0, NaN below 0."""
    x = let(x, "float32")
    wide = _wide(x)
    bits = let(T.reinterpret("int64", wide), "int64")
    mantissa_bits = T.bitwise_or(T.bitwise_and(bits, T.int64((1 << 52) - 1)), T.int64(1023 << 52))
    mantissa = let(T.reinterpret("float64", mantissa_bits), "float64")
    high = mantissa > T.float64(math.sqrt(2))
    exponent = let(
        T.Cast("float64", T.shift_right(bits, T.int64(52)) - T.int64(1023))
        + T.Select(high, T.float64(1), T.float64(0)),
        "float64",
    )
    mantissa = let(T.Select(high, mantissa * T.float64(0.5), mantissa), "float64")
    ratio = let((mantissa - T.float64(1.0)) / (mantissa + T.float64(1.0)), "float64")
    square, total = let(ratio * ratio, "float64"), T.float64(0.0)
    for term in range(_LOG_TERMS, -1, -1):
        total = let(total * square + T.float64(1 / (2 * term + 1)), "float64")
    value = _narrow(exponent * T.float64(math.log(2)) + T.float64(2.0) * ratio * total)
    infinite = T.float32(float("inf"))
    value = T.Select(x == infinite, infinite, value)
    value = T.Select(x == T.float32(0.0), T.float32(float("-inf")), value)
    return _keep_nan(x, T.Select(x < T.float32(0.0), T.float32(float("nan")), value))


def _erf(x: Expr) -> Expr:
    """The error function. Abramowitz and Stegun 7.1.28 is too coarse near 0, so its series is used there."""
    x = let(x, "float32")
    wide = let(T.min(T.abs(_wide(x)), T.float64(6.0)), "float64")
    square, series = let(wide * wide, "float64"), T.float64(0.0)
    # Σ (−1)ⁿ x^(2n+1) / (n! (2n+1)): 24 terms are exact to float32 up to 2.2.
    for term in range(24, -1, -1):
        coefficient = (-1.0) ** term / (math.factorial(term) * (2 * term + 1))
        series = let(series * square + T.float64(coefficient), "float64")
    near = wide * series * T.float64(2 / math.sqrt(math.pi))
    # Beyond: 1 - exp(-x²) / (x √π) · continued fraction, of which 10 terms are exact to float32.
    fraction = T.float64(0.0)
    for term in range(10, 0, -1):
        fraction = let(T.float64(term / 2) / (wide + fraction), "float64")
    far = T.float64(1.0) - _exp64(-square) / (T.float64(math.sqrt(math.pi)) * (wide + fraction))
    value = _narrow(T.Select(wide < T.float64(2.2), near, far))
    return _keep_nan(x, T.Select(x < T.float32(0.0), -value, value))


@dataclass(frozen=True)
class Elementary:
    """The functions of which all others are made."""

    exp: Callable[[Expr], Expr]
    sigmoid: Callable[[Expr], Expr]
    tanh: Callable[[Expr], Expr]
    erf: Callable[[Expr], Expr]
    log: Callable[[Expr], Expr]
    gelu_tanh: Callable[[Expr], Expr]


_COMPUTED: ContextVar[Elementary | None] = ContextVar("computed", default=None)


@contextmanager
def computed_by(functions: Elementary) -> Iterator[None]:
    """Kernels built within this context compute these functions so."""
    token = _COMPUTED.set(functions)
    try:
        yield
    finally:
        _COMPUTED.reset(token)


def _now() -> Elementary:
    return _COMPUTED.get() or _IN_FLOAT64


def exp(x: Expr) -> Expr:
    return _now().exp(x)


def sigmoid(x: Expr) -> Expr:
    return _now().sigmoid(x)


def tanh(x: Expr) -> Expr:
    return _now().tanh(x)


def erf(x: Expr) -> Expr:
    return _now().erf(x)


def log(x: Expr) -> Expr:
    """Natural logarithm: −inf at 0, NaN below 0."""
    return _now().log(x)


def sqrt(x: Expr) -> Expr:
    return T.sqrt(x)


def nearest(x: Expr) -> Expr:
    """Rounds to the nearest integer, ties to even."""
    x = let(x, "float32")
    # Floats from 2²³ on are integers, and a sum below 2²⁴ is rounded to one.
    magnitude = let(T.abs(x), "float32")
    rounded = let(magnitude + T.float32(1 << 23), "float32")
    value = let(rounded - T.float32(1 << 23), "float32")
    signed = T.bitwise_or(T.reinterpret("int32", value), T.bitwise_and(T.reinterpret("int32", x), T.int32(-(1 << 31))))
    return let(T.Select(magnitude < T.float32(1 << 23), T.reinterpret("float32", signed), x), "float32")


def floor(x: Expr) -> Expr:
    x = let(x, "float32")
    near = nearest(x)
    return let(T.Select(near > x, near - T.float32(1.0), near), "float32")


def ceil(x: Expr) -> Expr:
    x = let(x, "float32")
    near = nearest(x)
    return let(T.Select(near < x, near + T.float32(1.0), near), "float32")


def silu(x: Expr) -> Expr:
    x = let(x, "float32")
    return let(x * sigmoid(x), "float32")


def gelu(x: Expr) -> Expr:
    x = let(x, "float32")
    return let(x * T.float32(0.5) * (T.float32(1.0) + erf(x * T.float32(math.sqrt(0.5)))), "float32")


def _gelu_tanh(x: Expr) -> Expr:
    """x · (1 + tanh(u)) / 2 = x · sigmoid(2 u), where u = √(2/π) · (x + 0.044715 x³)."""
    x = let(x, "float32")
    wide = let(_wide(x), "float64")
    twice = wide * (T.float64(1.0) + wide * wide * T.float64(0.044715)) * T.float64(2 * math.sqrt(2 / math.pi))
    return _keep_nan(x, _narrow(wide / (T.float64(1.0) + _exp64(-twice))))


def gelu_tanh(x: Expr) -> Expr:
    """x · (1 + tanh(u)) / 2, where u = √(2/π) · (x + 0.044715 x³)."""
    return _now().gelu_tanh(x)


def quick_gelu(x: Expr) -> Expr:
    x = let(x, "float32")
    return let(x * sigmoid(x * T.float32(1.702)), "float32")


def relu(x: Expr) -> Expr:
    x = let(x, "float32")
    return let(T.Select(x < T.float32(0.0), T.float32(0.0), x), "float32")


def relu2(x: Expr) -> Expr:
    positive = relu(x)
    return let(positive * positive, "float32")


_IN_FLOAT64 = Elementary(_exp, _sigmoid, _tanh, _erf, _log, _gelu_tanh)
ACTIVATIONS: dict[str, Callable[[Expr], Expr]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "relu": relu,
    "relu2": relu2,
}
"""Activations of linear layers, by name."""
