"""Activations of linear layers by name: 16 float32 lanes each, in addition to silu, which `vector` has.

x · sigmoid(z) is x / (1 + 2^t) with t = −z · log2(e): one power and one quotient, accurate also where it is tiny.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from llmc.compiler.targets.cpu.kernels.ir import elementary, exponentials
from llmc.compiler.targets.cpu.kernels.ir.text import F32, FMA, I1, block, define, number

_LOG2E = math.log2(math.e)


def _product(result: str, a: str, b: str) -> str:
    return f"{result} = call {F32} @llmc_mul({F32} {a}, {F32} {b})"


def _function(name: str, lines: list[str]) -> str:
    return define(F32, name, f"{F32} %v", block([*lines, f"ret {F32} %result"]))


def _by_sigmoid(name: str, exponent: list[str]) -> str:
    """%v / (1 + 2^%power), for negative %v −0 from %power = 128 on. exponent: lines that set %power. NaN stays NaN."""
    lines = [
        *exponent,
        f"%most = call {F32} @llvm.minnum.v16f32({F32} %power, {F32} {number(128.0)})",
        f"%x = call {F32} @llvm.maxnum.v16f32({F32} %most, {F32} {number(-126.0)})",
        *exponentials.power_of_two(),
        f"%d = fadd {F32} %y, {number(1.0)}",
        f"%result = fdiv {F32} %v, %d",
    ]
    return _function(name, lines)


def _gelu_tanh() -> str:
    """v · (1 + tanh(u)) / 2 = v · sigmoid(2 u), where u = √(2/π) · (v + 0.044715 v³)."""
    factor = -2 * math.sqrt(2 / math.pi) * _LOG2E
    squared = _product("%square", "%v", "%v")
    inner = f"%factor = {FMA.format('%square', number(factor * 0.044715), number(factor))}"
    return _by_sigmoid("gelu_tanh", [squared, inner, _product("%power", "%v", "%factor")])


def _gelu() -> str:
    """v · (1 + erf(v / √2)) / 2."""
    lines = [
        _product("%z", "%v", number(math.sqrt(0.5))),
        f"%erf = call {F32} @llmc_erf({F32} %z)",
        _product("%half", "%v", number(0.5)),
        f"%result = {FMA.format('%half', '%erf', '%half')}",
    ]
    return elementary.erf() + _function("gelu", lines)


def _quick_gelu() -> str:
    return _by_sigmoid("quick_gelu", [_product("%power", "%v", number(-1.702 * _LOG2E))])


def _positive(result: str) -> list[str]:
    below = f"%below = fcmp olt {F32} %v, zeroinitializer"
    return [below, f"{result} = select {I1} %below, {F32} zeroinitializer, {F32} %v"]


def _relu() -> str:
    return _function("relu", _positive("%result"))


def _relu2() -> str:
    return _function("relu2", [*_positive("%p"), _product("%result", "%p", "%p")])


ACTIVATIONS: dict[str, Callable[[], str]] = {
    "silu": str,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": _relu,
    "relu2": _relu2,
}
"""The IR text of the helper of each name, to be appended to `vector.helpers`."""
