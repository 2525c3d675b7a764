"""8-bit floats (E4M3) as float32, by way of half precision, which all supported CPUs convert."""

from __future__ import annotations

from llmc.compiler.targets.cpu.kernels.ir.text import F32, I32, block, constant, define, splat

_SIGN_AND_REST = 0xBF80 - (1 << 16)
"""Masks a half's sign, and the seven bits below it that hold E4M3's exponent and mantissa."""


def _element(place: int) -> str:
    """The float in byte `place` of each lane, times 2⁻⁸: the same bits as a half, whose exponent bias differs.

    Subnormals work too: the conversion has no flush-to-zero mode. NaN becomes 480 · 2⁻⁸.
    """
    halves = "<32 x i16>"
    order = constant(range(place // 2, 32, 2))
    lines = [
        f"%b = bitcast {I32} %w to {halves}",
        f"%t = shl {halves} %b, {splat(8 if place % 2 == 0 else 0, 'i16', 32)}",
        f"%s = ashr {halves} %t, {splat(1, 'i16', 32)}",
        f"%m = and {halves} %s, {splat(_SIGN_AND_REST, 'i16', 32)}",
        f"%e = shufflevector {halves} %m, {halves} undef, <16 x i32> {order}",
        "%h = bitcast <16 x i16> %e to <16 x half>",
        f"%r = fpext <16 x half> %h to {F32}",
        f"ret {F32} %r",
    ]
    return define(F32, f"e4m3_{place}", f"{I32} %w", block(lines))


def elements() -> str:
    """e4m3_0 … e4m3_3."""
    return "".join(_element(place) for place in range(4))
