"""Elementary functions for generic kernels, in addition to those of `vector`: 16 float32 lanes each.

They use only fma, fenced products, sums and quotients, so the code generator cannot contract anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmc.compiler.targets.coefficients import ERF, LOG, TANH
from llmc.compiler.targets.cpu.kernels.ir.text import F32, FMA, I1, I32, block, define, number, splat
from llmc.compiler.targets.cpu.kernels.ir.vector import fold

_DECLARATIONS = "".join(f"declare {F32} @llvm.{name}.v16f32({F32})\n" for name in ("fabs", "floor", "ceil"))
_DECLARATIONS += "".join(f"declare {F32} @llvm.{name}.v16f32({F32}, {F32})\n" for name in ("maximum", "minimum"))

_TANH_FORM = ("tanh", 7.99881172180175781, 4e-4, TANH)
_ERF_FORM = ("erf", 4.0, 0.0, ERF)


def _define(name: str, lines: Sequence[str], args: str = f"{F32} %v") -> str:
    return define(F32, name, args, block(lines))


def _mul(result: str, a: str, b: str) -> list[str]:
    """A product that is never contracted with a later sum."""
    fence = f"{result} = call {F32} @llvm.arithmetic.fence.v16f32({F32} {result}.p)"
    return [f"{result}.p = fmul {F32} {a}, {b}", fence]


def _horner(prefix: str, x: str, coefficients: Sequence[float]) -> tuple[list[str], str]:
    lines, value = [], number(coefficients[0])
    for index, coefficient in enumerate(coefficients[1:]):
        result = f"%{prefix}{index}"
        lines.append(f"{result} = {FMA.format(value, x, number(coefficient))}")
        value = result
    return lines, value


def _rational(name: str, limit: float, identity_below: float, forms: tuple[Sequence[float], Sequence[float]]) -> str:
    """x P(x²) / Q(x²) for x clamped to ±limit; x itself where |x| < identity_below. NaN stays NaN."""
    numerator, p = _horner("p", "%x2", forms[0])
    denominator, q = _horner("q", "%x2", forms[1])
    lines = [
        f"%cap = call {F32} @llvm.minnum.v16f32({F32} %v, {F32} {number(limit)})",
        f"%x = call {F32} @llvm.maxnum.v16f32({F32} %cap, {F32} {number(-limit)})",
        *_mul("%x2", "%x", "%x"),
        *numerator,
        *denominator,
        *_mul("%odd", "%x", p),
        f"%y = fdiv {F32} %odd, {q}",
        f"%size = call {F32} @llvm.fabs.v16f32({F32} %v)",
        f"%tiny = fcmp ult {F32} %size, {number(identity_below)}",
        f"%r = select {I1} %tiny, {F32} %v, {F32} %y",
        f"ret {F32} %r",
    ]
    return _define(name, lines)


def _log() -> str:
    """log(x): −inf at 0, NaN below 0, inf at inf; subnormal numbers count as 0."""
    poly, value = _horner("p", "%m", LOG)
    lines = [
        f"%bits = bitcast {F32} %v to {I32}",
        f"%field = lshr {I32} %bits, {splat(23)}",
        f"%e0 = sub {I32} %field, {splat(126)}",
        f"%low = and {I32} %bits, {splat(0x007FFFFF)}",
        f"%half = or {I32} %low, {splat(0x3F000000)}",
        f"%m0 = bitcast {I32} %half to {F32}",
        f"%small = fcmp olt {F32} %m0, {number(0.70710678118654752)}",
        f"%e1 = add {I32} %e0, {splat(-1)}",
        f"%ei = select {I1} %small, {I32} %e1, {I32} %e0",
        f"%e = sitofp {I32} %ei to {F32}",
        f"%twice = fadd {F32} %m0, %m0",
        f"%m1 = select {I1} %small, {F32} %twice, {F32} %m0",
        f"%m = fsub {F32} %m1, {number(1.0)}",
        *_mul("%z", "%m", "%m"),
        *poly,
        *_mul("%mz", "%m", "%z"),
        *_mul("%y0", "%mz", value),
        f"%y1 = {FMA.format('%e', number(-2.12194440e-4), '%y0')}",
        f"%y2 = {FMA.format('%z', number(-0.5), '%y1')}",
        f"%y3 = fadd {F32} %m, %y2",
        f"%y4 = {FMA.format('%e', number(0.693359375), '%y3')}",
        f"%positive = fcmp oge {F32} %v, {number(1.17549435e-38)}",
        f"%negative = fcmp olt {F32} %v, {number(0.0)}",
        f"%isnan = fcmp uno {F32} %v, %v",
        f"%bad = or {I1} %negative, %isnan",
        f"%edge = select {I1} %bad, {F32} {number(float('nan'))}, {F32} {number(float('-inf'))}",
        f"%y5 = select {I1} %positive, {F32} %y4, {F32} %edge",
        f"%isinf = fcmp oeq {F32} %v, {number(float('inf'))}",
        f"%r = select {I1} %isinf, {F32} %v, {F32} %y5",
        f"ret {F32} %r",
    ]
    return _define("log", lines)


def _intrinsic(name: str, intrinsic: str) -> str:
    return _define(name, [f"%r = call {F32} @llvm.{intrinsic}.v16f32({F32} %v)", f"ret {F32} %r"])


def _exp_any() -> str:
    """exp(x) for any x: inf on overflow, NaN for NaN, 0 below −87.33."""
    lines = [
        f"%big = fcmp ogt {F32} %v, {number(88.0)}",
        # Beyond the range of llmc_exp: square exp(x / 2).
        *_mul("%half", "%v", number(0.5)),
        f"%x = select {I1} %big, {F32} %half, {F32} %v",
        f"%e = call {F32} @llmc_exp({F32} %x)",
        *_mul("%square", "%e", "%e"),
        f"%y = select {I1} %big, {F32} %square, {F32} %e",
        f"%isnan = fcmp uno {F32} %v, %v",
        f"%r = select {I1} %isnan, {F32} %v, {F32} %y",
        f"ret {F32} %r",
    ]
    return _define("exp_any", lines)


def _sigmoid() -> str:
    lines = [
        f"%n = fneg {F32} %v",
        f"%e = call {F32} @llmc_exp_any({F32} %n)",
        f"%d = fadd {F32} %e, {number(1.0)}",
        f"%r = fdiv {F32} {number(1.0)}, %d",
        f"ret {F32} %r",
    ]
    return _define("sigmoid", lines)


def _extreme(name: str) -> str:
    """maximum or minimum: NaN if either operand is, as in torch."""
    lines = [f"%r = call {F32} @llvm.{name}.v16f32({F32} %a, {F32} %b)", f"ret {F32} %r"]
    return _define(name, lines, f"{F32} %a, {F32} %b")


def _extreme_lanes(name: str) -> str:
    return fold(f"{name}_lanes", f"call {F32} @llvm.{name}.v16f32({F32} {{a}}, {F32} {{b}})")


def _alone(form: tuple[str, float, float, tuple[Sequence[float], Sequence[float]]]) -> str:
    return f"declare {F32} @llvm.fabs.v16f32({F32})\n" + _rational(*form)


def tanh() -> str:
    """The IR text of tanh alone, for kernels without `helpers`."""
    return _alone(_TANH_FORM)


def erf() -> str:
    """The IR text of erf alone."""
    return _alone(_ERF_FORM)


def helpers() -> str:
    """The IR text, to be appended to `vector.helpers`."""
    return "".join(
        (
            _DECLARATIONS,
            _rational(*_TANH_FORM),
            _rational(*_ERF_FORM),
            _log(),
            _exp_any(),
            _sigmoid(),
            *(text(name) for name in ("maximum", "minimum") for text in (_extreme, _extreme_lanes)),
            *(_intrinsic(name, intrinsic) for name, intrinsic in UNARY_INTRINSICS),
        )
    )


UNARY_INTRINSICS = (("abs", "fabs"), ("floor", "floor"), ("ceil", "ceil"), ("round", "roundeven"))
