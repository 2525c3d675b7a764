"""Elementary functions of a float32 in float32 alone: many GPUs compute double precision slowly, and some not at all.

All are sums, products, quotients and fma, so CUDA and OpenCL give the same bits. Errors are a few units in the last
place.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.coefficients import ERF, EXP, LOG, TANH
from llmc.compiler.targets.gpu.kernels.fma import fma
from llmc.compiler.targets.reference.kernels.frame import Expr, is_nan, let
from llmc.compiler.targets.reference.kernels.functions import Elementary

_ROUNDER = 12582912.0  # 1.5 · 2²³: a sum with it has no fraction bits
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4  # their sum is ln 2; products of the first are exact
_ONE, _HALF_ONE = 0x3F800000, 0x3F000000  # bits of 1 and of ½


def _float(value: Expr) -> Expr:
    return let(value, "float32")


def _horner(x: Expr, coefficients: Sequence[float]) -> Expr:
    value: Expr = T.float32(coefficients[0])
    for coefficient in coefficients[1:]:
        value = _float(fma(value, x, T.float32(coefficient)))
    return value


def exp(x: Expr) -> Expr:
    x = _float(x)
    # Beyond these, the result is 0 or infinite whatever x is.
    t = _float(T.max(T.min(x, T.float32(89.0)), T.float32(-105.0)))
    n = _float(fma(t, T.float32(1.44269504), T.float32(_ROUNDER)) - T.float32(_ROUNDER))
    r = _float(fma(n, T.float32(-_LN2_LOW), fma(n, T.float32(-_LN2_HIGH), t)))
    value = _float(fma(_horner(r, EXP) * r, r, r) + T.float32(1.0))
    # In two factors, since 2ⁿ itself may be no float.
    whole = let(T.Cast("int32", n))
    half = let(T.shift_right(whole, T.int32(1)))
    for power in (half, let(whole - half)):
        value = _float(value * T.reinterpret("float32", T.shift_left(power, T.int32(23)) + T.int32(_ONE)))
    return _float(T.Select(is_nan(x), x, value))


def sigmoid(x: Expr) -> Expr:
    return _float(T.float32(1.0) / (T.float32(1.0) + exp(-x)))


def _rational(x: Expr, limit: float, forms: tuple[Sequence[float], Sequence[float]]) -> Expr:
    """x P(x²) / Q(x²) for x clamped to ±limit."""
    clamped = _float(T.max(T.min(x, T.float32(limit)), T.float32(-limit)))
    square = _float(clamped * clamped)
    # The quotient first: a product of a small x may be subnormal.
    return _float(clamped * _float(_horner(square, forms[0]) / _horner(square, forms[1])))


def tanh(x: Expr) -> Expr:
    x = _float(x)
    small = T.abs(x) < T.float32(4e-4)  # x itself, to half a unit
    return _float(T.Select(T.Or(small, is_nan(x)), x, _rational(x, 7.99881172180175781, TANH)))


def erf(x: Expr) -> Expr:
    x = _float(x)
    return _float(T.Select(is_nan(x), x, _rational(x, 4.0, ERF)))


def log(x: Expr) -> Expr:
    """Natural logarithm: −inf at 0, NaN below 0; subnormal numbers count as 0."""
    x = _float(x)
    bits = let(T.reinterpret("int32", x))
    exponent = let(T.shift_right(bits, T.int32(23)) - 126)
    half = _float(T.reinterpret("float32", T.bitwise_or(T.bitwise_and(bits, T.int32(0x007FFFFF)), T.int32(_HALF_ONE))))
    low = let(T.Cast("int32", half < T.float32(0.70710678)))
    whole = _float(T.Cast("float32", exponent - low))
    m = _float(T.Select(low == 1, half + half, half) - T.float32(1.0))
    square = _float(m * m)
    value = _float(fma(whole, T.float32(_LN2_LOW), m * square * _horner(m, LOG)))
    value = _float(m + fma(square, T.float32(-0.5), value))
    value = _float(fma(whole, T.float32(_LN2_HIGH), value))
    infinite = T.float32(float("inf"))
    value = T.Select(x == infinite, infinite, value)
    value = T.Select(x < T.float32(2.0**-126), T.float32(float("-inf")), value)
    return _float(T.Select(is_nan(x), x, T.Select(x < T.float32(0.0), T.float32(float("nan")), value)))


def gelu_tanh(x: Expr) -> Expr:
    """x · sigmoid(2 u), where u = √(2/π) · (x + 0.044715 x³)."""
    x = _float(x)
    cube = _float(x * x * x)
    twice = _float(fma(cube, T.float32(0.044715), x) * T.float32(1.5957691216))
    return _float(x * sigmoid(twice))


SINGLE = Elementary(exp, sigmoid, tanh, erf, log, gelu_tanh)
