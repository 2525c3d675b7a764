"""exp and exp2 as polynomials, 16 float32 lanes each, from fma and fenced products."""

from __future__ import annotations

from llmc.compiler.targets.cpu.kernels.ir.text import F32, FMA, I1, I32, block, define, float_bits, splat


def _polynomial(*coefficients: str) -> list[str]:
    """Horner's rule in %r, highest power first: results %q1, %q2, …; the last is the value."""
    first, *rest = map(float_bits, coefficients)
    lines, factors = [], ("%r", first)
    for number, coefficient in enumerate(rest, 1):
        lines.append(f"%q{number} = {FMA.format(*factors, coefficient)}")
        factors = (f"%q{number}", "%r")
    return lines


def _scale(value: str) -> list[str]:
    """%y = value · 2^%i, by adding to the exponent field."""
    return [
        f"%e = shl {I32} %i, {splat(23)}",
        f"%b = bitcast {F32} {value} to {I32}",
        f"%s = add {I32} %b, %e",
        f"%y = bitcast {I32} %s to {F32}",
    ]


_ONE = "0x3FF0000000000000"


def power_of_two() -> list[str]:
    """%y = 2^%x, relative error below 2e-7, for %x from -126 to 128; exact for integers."""
    rounder = float_bits("0x4168000000000000")  # adding 1.5 · 2^23 leaves the nearest integer in the low bits
    powers = ("0x3F55BBA140000000", "0x3F83CEA880000000", "0x3FAC6B7520000000", "0x3FCEBF9BC0000000",
              "0x3FE62E42A0000000", _ONE)  # fmt: skip
    return [
        f"%t = fadd {F32} %x, {rounder}",
        f"%n = fsub {F32} %t, {rounder}",
        f"%r = fsub {F32} %x, %n",
        *_polynomial(*powers),
        f"%i = bitcast {F32} %t to {I32}",
        *_scale("%q5"),
    ]


def exp() -> str:
    """exp(x), relative error below 2e-7; 0 below -87.33, exp(0) = 1 exactly; x above 88 is taken as 88."""
    log2e, ln2_high, ln2_low = (
        float_bits("0x3FF7154760000000"),
        float_bits("0xBFE6300000000000"),
        float_bits("0x3F2BD01060000000"),
    )
    top, bottom = float_bits("0x4056000000000000"), float_bits("0xC055D51EC0000000")
    powers = ("0x3F2A0D2CE0000000", "0x3F56E879C0000000", "0x3F81112100000000", "0x3FA5553820000000",
              "0x3FC5555540000000", "0x3FE0000000000000", _ONE, _ONE)  # fmt: skip
    lines = [
        f"%under = fcmp olt {F32} %v, {bottom}",
        f"%cap = call {F32} @llvm.minnum.v16f32({F32} %v, {F32} {top})",
        f"%x = call {F32} @llvm.maxnum.v16f32({F32} %cap, {F32} {bottom})",
        f"%t0 = fmul {F32} %x, {log2e}",
        f"%t = call {F32} @llvm.arithmetic.fence.v16f32({F32} %t0)",
        f"%n = call {F32} @llvm.roundeven.v16f32({F32} %t)",
        f"%r0 = {FMA.format('%n', ln2_high, '%x')}",
        f"%r = {FMA.format('%n', ln2_low, '%r0')}",
        *_polynomial(*powers),
        f"%i = fptosi {F32} %n to {I32}",
        *_scale("%q7"),
        f"%z = select {I1} %under, {F32} zeroinitializer, {F32} %y",
        f"ret {F32} %z",
    ]
    return define(F32, "exp", f"{F32} %v", block(lines))


def exp2() -> str:
    """2^x for x ≤ 0, relative error below 2e-7; 2^0 = 1 exactly, 0 for x ≤ -127 and for NaN."""
    bottom = float_bits("0xC05FC00000000000")
    lines = [
        f"%in = fcmp ogt {F32} %v, {bottom}",
        f"%x = select {I1} %in, {F32} %v, {F32} {bottom}",
        *power_of_two(),
        f"ret {F32} %y",
    ]
    return define(F32, "exp2", f"{F32} %v", block(lines))
