"""Elementary functions of generic kernels in LLVM IR text, beside the helpers of vector_ir: 16 float32 lanes each.

Only fma, products behind a fence, sums and quotients: the code generator has no contraction left to choose.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from llmc.compiler.kernels.vector_ir import fold

_F = "<16 x float>"
_I = "<16 x i32>"
_M = "<16 x i1>"
_H = "<16 x i16>"

_DECLARATIONS = "".join(f"declare {_F} @llvm.{name}.v16f32({_F})\n" for name in ("fabs", "floor", "ceil"))
_DECLARATIONS += "".join(f"declare {_F} @llvm.{name}.v16f32({_F}, {_F})\n" for name in ("maximum", "minimum"))

# Odd numerators and even denominators, highest power first: tanh on [-8, 8] and erf on [-4, 4] to a few units in the
# last place.
_TANH = (
    (-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08, 1.48572235717979e-05,
     6.37261928875436e-04, 4.89352455891786e-03),
    (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03),
)  # fmt: skip
_ERF = (
    (-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05,
     -7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02),
    (-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03,
     -1.42647390514189e-02),
)  # fmt: skip
_LOG = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
    2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip


def _f(value: float) -> str:
    """A float32 constant vector; LLVM spells the float as the bits of the equal double."""
    (single,) = struct.unpack("<f", struct.pack("<f", value))
    (bits,) = struct.unpack("<Q", struct.pack("<d", single))
    return "<" + ", ".join([f"float 0x{bits:016X}"] * 16) + ">"


def _i(value: int) -> str:
    return "<" + ", ".join([f"i32 {value}"] * 16) + ">"


def _define(name: str, lines: Sequence[str], args: str = f"{_F} %v") -> str:
    body = "".join(f"  {line}\n" for line in lines)
    return f"define linkonce_odr hidden {_F} @llmc_{name}({args}) #0 {{\n{body}}}\n"


def _mul(result: str, a: str, b: str) -> list[str]:
    """A product that no later sum is contracted with."""
    fence = f"{result} = call {_F} @llvm.arithmetic.fence.v16f32({_F} {result}.p)"
    return [f"{result}.p = fmul {_F} {a}, {b}", fence]


def _horner(prefix: str, x: str, coefficients: Sequence[float]) -> tuple[list[str], str]:
    lines, value = [], _f(coefficients[0])
    for index, coefficient in enumerate(coefficients[1:]):
        result = f"%{prefix}{index}"
        lines.append(
            f"{result} = call {_F} @llvm.fma.v16f32({_F} {value}, {_F} {x}, {_F} {_f(coefficient)})",
        )
        value = result
    return lines, value


def _rational(name: str, limit: float, identity_below: float, forms: tuple[Sequence[float], Sequence[float]]) -> str:
    """x P(x²) / Q(x²) for x clamped to ±limit; x itself where |x| < identity_below. A NaN stays one."""
    numerator, p = _horner("p", "%x2", forms[0])
    denominator, q = _horner("q", "%x2", forms[1])
    lines = [
        f"%cap = call {_F} @llvm.minnum.v16f32({_F} %v, {_F} {_f(limit)})",
        f"%x = call {_F} @llvm.maxnum.v16f32({_F} %cap, {_F} {_f(-limit)})",
        *_mul("%x2", "%x", "%x"),
        *numerator,
        *denominator,
        *_mul("%odd", "%x", p),
        f"%y = fdiv {_F} %odd, {q}",
        f"%size = call {_F} @llvm.fabs.v16f32({_F} %v)",
        f"%tiny = fcmp ult {_F} %size, {_f(identity_below)}",
        f"%r = select {_M} %tiny, {_F} %v, {_F} %y",
        f"ret {_F} %r",
    ]
    return _define(name, lines)


def _log() -> str:
    """log(x): −inf at 0, NaN below, inf at inf; subnormal numbers count as 0."""
    poly, value = _horner("p", "%m", _LOG)
    fma = f"call {_F} @llvm.fma.v16f32({_F} {{}}, {_F} {{}}, {_F} {{}})"
    lines = [
        f"%bits = bitcast {_F} %v to {_I}",
        f"%field = lshr {_I} %bits, {_i(23)}",
        f"%e0 = sub {_I} %field, {_i(126)}",
        f"%low = and {_I} %bits, {_i(0x007FFFFF)}",
        f"%half = or {_I} %low, {_i(0x3F000000)}",
        f"%m0 = bitcast {_I} %half to {_F}",
        f"%small = fcmp olt {_F} %m0, {_f(0.70710678118654752)}",
        f"%e1 = add {_I} %e0, {_i(-1)}",
        f"%ei = select {_M} %small, {_I} %e1, {_I} %e0",
        f"%e = sitofp {_I} %ei to {_F}",
        f"%twice = fadd {_F} %m0, %m0",
        f"%m1 = select {_M} %small, {_F} %twice, {_F} %m0",
        f"%m = fsub {_F} %m1, {_f(1.0)}",
        *_mul("%z", "%m", "%m"),
        *poly,
        *_mul("%mz", "%m", "%z"),
        *_mul("%y0", "%mz", value),
        f"%y1 = {fma.format('%e', _f(-2.12194440e-4), '%y0')}",
        f"%y2 = {fma.format('%z', _f(-0.5), '%y1')}",
        f"%y3 = fadd {_F} %m, %y2",
        f"%y4 = {fma.format('%e', _f(0.693359375), '%y3')}",
        f"%positive = fcmp oge {_F} %v, {_f(1.17549435e-38)}",
        f"%negative = fcmp olt {_F} %v, {_f(0.0)}",
        f"%isnan = fcmp uno {_F} %v, %v",
        f"%bad = or {_M} %negative, %isnan",
        f"%edge = select {_M} %bad, {_F} {_f(float('nan'))}, {_F} {_f(float('-inf'))}",
        f"%y5 = select {_M} %positive, {_F} %y4, {_F} %edge",
        f"%isinf = fcmp oeq {_F} %v, {_f(float('inf'))}",
        f"%r = select {_M} %isinf, {_F} %v, {_F} %y5",
        f"ret {_F} %r",
    ]
    return _define("log", lines)


def _intrinsic(name: str, intrinsic: str) -> str:
    return _define(name, [f"%r = call {_F} @llvm.{intrinsic}.v16f32({_F} %v)", f"ret {_F} %r"])


def _to_bf16() -> str:
    """The nearest bfloat16, as float32."""
    lines = [
        f"%h = call {_H} @llmc_round_bf16({_F} %v)",
        f"%w = zext {_H} %h to {_I}",
        f"%s = shl {_I} %w, {_i(16)}",
        f"%r = bitcast {_I} %s to {_F}",
        f"ret {_F} %r",
    ]
    return _define("to_bf16", lines)


def _exp_any() -> str:
    """exp(x) for any x: inf where it is too large, NaN for NaN; 0 below -87.33."""
    lines = [
        f"%big = fcmp ogt {_F} %v, {_f(88.0)}",
        # Past what llmc_exp takes, the square of the root.
        *_mul("%half", "%v", _f(0.5)),
        f"%x = select {_M} %big, {_F} %half, {_F} %v",
        f"%e = call {_F} @llmc_exp({_F} %x)",
        *_mul("%square", "%e", "%e"),
        f"%y = select {_M} %big, {_F} %square, {_F} %e",
        f"%isnan = fcmp uno {_F} %v, %v",
        f"%r = select {_M} %isnan, {_F} %v, {_F} %y",
        f"ret {_F} %r",
    ]
    return _define("exp_any", lines)


def _sigmoid() -> str:
    lines = [
        f"%n = fneg {_F} %v",
        f"%e = call {_F} @llmc_exp_any({_F} %n)",
        f"%d = fadd {_F} %e, {_f(1.0)}",
        f"%r = fdiv {_F} {_f(1.0)}, %d",
        f"ret {_F} %r",
    ]
    return _define("sigmoid", lines)


def _extreme(name: str) -> str:
    """maximum or minimum: NaN where either is, as in torch."""
    lines = [f"%r = call {_F} @llvm.{name}.v16f32({_F} %a, {_F} %b)", f"ret {_F} %r"]
    return _define(name, lines, f"{_F} %a, {_F} %b")


def _extreme_lanes(name: str) -> str:
    return fold(f"{name}_lanes", f"call {_F} @llvm.{name}.v16f32({_F} {{a}}, {_F} {{b}})")


def helpers() -> str:
    """The IR text, to be joined to that of `vector_ir.helpers`."""
    return "".join(
        (
            _DECLARATIONS,
            _rational("tanh", 7.99881172180175781, 4e-4, _TANH),
            _rational("erf", 4.0, 0.0, _ERF),
            _log(),
            _exp_any(),
            _sigmoid(),
            _to_bf16(),
            *(text(name) for name in ("maximum", "minimum") for text in (_extreme, _extreme_lanes)),
            *(_intrinsic(name, intrinsic) for name, intrinsic in UNARY_INTRINSICS),
        )
    )


UNARY_INTRINSICS = (("abs", "fabs"), ("floor", "floor"), ("ceil", "ceil"), ("round", "roundeven"))
