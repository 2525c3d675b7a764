"""One-byte numbers in the KV cache: rounding, and products with 16-bit numbers."""

from __future__ import annotations

import struct

from llmc.compiler.targets.cpu.kernels.ir.text import F32, I1, I32, block, constant, define, splat
from llmc.compiler.targets.cpu.target import Target
from llmc.kv_dtypes import KV_DTYPES

_B = "<16 x i8>"


def _float(value: float) -> str:
    """A constant vector of one float32, spelt for LLVM as the bits of the equal double."""
    (bits,) = struct.unpack("<Q", struct.pack("<d", value))
    return splat(f"0x{bits:016X}", "float")


def _round_int8() -> str:
    """Rounds to nearest, ties to even, clamps to ±127, and adds 128; NaN becomes 1."""
    lines = [
        f"%l = call {F32} @llvm.maxnum.v16f32({F32} %v, {F32} {_float(-127.0)})",
        f"%u = call {F32} @llvm.minnum.v16f32({F32} %l, {F32} {_float(127.0)})",
        f"%n = call {F32} @llvm.roundeven.v16f32({F32} %u)",
        f"%i = fptosi {F32} %n to {I32}",
        f"%s = add {I32} %i, {splat(128)}",
        f"%r = trunc {I32} %s to {_B}",
        f"ret {_B} %r",
    ]
    return define(_B, "round_int8", f"{F32} %v", block(lines))


def _round_fp8(name: str, mantissa: int, bias: int) -> str:
    """The nearest 8-bit float, ties to even; overflow and NaN become the largest."""
    shift, largest = 23 - mantissa, float(KV_DTYPES[name].largest or 0)
    normal, unit = 2.0 ** (1 - bias), 2.0 ** (1 - bias - mantissa)
    # Below `normal` all floats are multiples of `unit`; adding this constant rounds to such multiples.
    rounder = unit * 2.0**23
    (rounder_bits,) = struct.unpack("<i", struct.pack("<f", rounder))
    lines = [
        f"%b = bitcast {F32} %v to {I32}",
        f"%m = and {I32} %b, {splat(0x7FFFFFFF)}",
        f"%a = bitcast {I32} %m to {F32}",
        f"%c = call {F32} @llvm.minnum.v16f32({F32} %a, {F32} {_float(largest)})",
        f"%cb = bitcast {F32} %c to {I32}",
        f"%q = lshr {I32} %cb, {splat(shift)}",
        f"%odd = and {I32} %q, {splat(1)}",
        f"%bias = add {I32} %odd, {splat((1 << (shift - 1)) - 1)}",
        f"%sum = add {I32} %cb, %bias",
        f"%up = lshr {I32} %sum, {splat(shift)}",
        f"%n = sub {I32} %up, {splat((127 - bias) << mantissa)}",
        f"%f = fadd {F32} %c, {_float(rounder)}",
        f"%fb = bitcast {F32} %f to {I32}",
        f"%s = sub {I32} %fb, {splat(rounder_bits)}",
        f"%small = fcmp olt {F32} %c, {_float(normal)}",
        f"%e = select {I1} %small, {I32} %s, {I32} %n",
        f"%t = lshr {I32} %b, {splat(24)}",
        f"%sign = and {I32} %t, {splat(0x80)}",
        f"%w = or {I32} %e, %sign",
        f"%r = trunc {I32} %w to {_B}",
        f"ret {_B} %r",
    ]
    return define(_B, f"round_{name}", f"{F32} %v", block(lines))


def rounding(dtype: str) -> str:
    """round_`dtype`, and helpers that find a scale:
    - widest: the larger magnitudes of two vectors; NaN counts as the largest;
    - widest_lane: the widest magnitude of a vector, in every lane;
    - spoilt: a scale, made NaN where `widest` is not finite.
    """
    if dtype == "int8":
        own = _round_int8()
    else:
        own = _round_fp8(dtype, *((3, 7) if dtype == "fp8_e4m3" else (2, 15)))
    return own + widest()


def widest() -> str:
    """Magnitudes compare like their bits."""
    smax, reduce = f"{I32} @llvm.smax.v16i32", "i32 @llvm.vector.reduce.smax.v16i32"
    two = [
        f"%x = bitcast {F32} %a to {I32}",
        f"%y = bitcast {F32} %b to {I32}",
        f"%xm = and {I32} %x, {splat(0x7FFFFFFF)}",
        f"%ym = and {I32} %y, {splat(0x7FFFFFFF)}",
        f"%m = call {smax}({I32} %xm, {I32} %ym)",
        f"%r = bitcast {I32} %m to {F32}",
        f"ret {F32} %r",
    ]
    lane = [
        f"%x = bitcast {F32} %v to {I32}",
        f"%m = call {reduce}({I32} %x)",
        f"%i = insertelement {I32} undef, i32 %m, i32 0",
        f"%s = shufflevector {I32} %i, {I32} undef, {I32} zeroinitializer",
        f"%r = bitcast {I32} %s to {F32}",
        f"ret {F32} %r",
    ]
    spoilt = [
        f"%z = fsub {F32} %widest, %widest",
        f"%r = fadd {F32} %scale, %z",
        f"ret {F32} %r",
    ]
    return (
        f"\ndeclare {smax}({I32}, {I32})\ndeclare {reduce}({I32})\n"
        + define(F32, "widest", f"{F32} %a, {F32} %b", block(two))
        + define(F32, "widest_lane", f"{F32} %v", block(lane))
        + define(F32, "spoilt", f"{F32} %scale, {F32} %widest", block(spoilt))
    )


def e5m2_elements() -> str:
    """fp8_e5m2_0 … fp8_e5m2_3: the float in a byte of each lane, which is the upper half of an IEEE half."""
    text, halves = "", "<32 x i16>"
    for place in range(4):
        order = constant(range(place // 2, 32, 2))
        take = (
            f"shl {halves} %b, {splat(8, 'i16', 32)}"
            if place % 2 == 0
            else f"and {halves} %b, {splat(-256, 'i16', 32)}"
        )
        lines = [
            f"%b = bitcast {I32} %w to {halves}",
            f"%t = {take}",
            f"%e = shufflevector {halves} %t, {halves} undef, <16 x i32> {order}",
            "%h = bitcast <16 x i16> %e to <16 x half>",
            f"%r = fpext <16 x half> %h to {F32}",
            f"ret {F32} %r",
        ]
        text += define(F32, f"e5m2_{place}", f"{I32} %w", block(lines))
    return text


def _dot(target: Target) -> str:
    """dot_s16: acc + the products of two 16-bit numbers, per lane."""
    args, halves = f"{I32} %acc, {I32} %a, {I32} %b", "<32 x i16>"
    lines = [f"%{name}h = bitcast {I32} %{name} to {halves}" for name in "ab"]
    if target.lanes == 16:
        intrinsic = f"{I32} @llvm.x86.avx512.pmaddw.d.512"
        declaration = f"\ndeclare {intrinsic}({halves}, {halves})\n"
        lines.append(f"%p = call {intrinsic}({halves} %ah, {halves} %bh)")
    else:
        part, words = "<16 x i16>", "<8 x i32>"
        intrinsic = f"{words} @llvm.x86.avx2.pmadd.wd"
        declaration = f"\ndeclare {intrinsic}({part}, {part})\n"
        for half in range(2):
            order = constant(range(16 * half, 16 * half + 16))
            for name in "ab":
                lines.append(f"%{name}{half} = shufflevector {halves} %{name}h, {halves} undef, <16 x i32> {order}")
            lines.append(f"%p{half} = call {intrinsic}({part} %a{half}, {part} %b{half})")
        lines.append(f"%p = shufflevector {words} %p0, {words} %p1, <16 x i32> {constant(range(16))}")
    lines += [f"%r = add {I32} %acc, %p", f"ret {I32} %r"]
    return declaration + define(I32, "dot_s16", args, block(lines))


def products(target: Target) -> str:
    """dot_s16, s16_sum, floats_of.
    bytes_even, bytes_odd: those bytes of a vector as numbers of 16 bits.
    rounded_s16: v · inverse as whole numbers of at most `limit`.
    put_pairs: stores 16 numbers as 16-bit pairs; of each four, the even ones first.
    unless: 0 where v is `is`, elsewhere `other`.
    """
    halves = "<32 x i16>"
    even = [f"%r = and {I32} %w, {splat(0x00FF00FF)}", f"ret {I32} %r"]
    odd = [
        f"%h = bitcast {I32} %w to {halves}",
        f"%s = lshr {halves} %h, {splat(8, 'i16', 32)}",
        f"%r = bitcast {halves} %s to {I32}",
        f"ret {I32} %r",
    ]
    rounded = [
        f"%t = fmul {F32} %v, %inverse",
        f"%n = fneg {F32} %limit",
        f"%l = call {F32} @llvm.maxnum.v16f32({F32} %t, {F32} %n)",
        f"%u = call {F32} @llvm.minnum.v16f32({F32} %l, {F32} %limit)",
        f"%w = call {F32} @llvm.roundeven.v16f32({F32} %u)",
        f"%r = fptosi {F32} %w to {I32}",
        f"ret {I32} %r",
    ]
    order = constant(four + place for four in range(0, 16, 4) for place in (0, 2, 1, 3))
    put = [
        f"%s = trunc {I32} %v to <16 x i16>",
        f"%o = shufflevector <16 x i16> %s, <16 x i16> undef, <16 x i32> {order}",
        "store <16 x i16> %o, ptr %p, align 4",
        "ret i32 0",
    ]
    unless = [
        f"%c = fcmp oeq {F32} %v, %is",
        f"%r = select {I1} %c, {F32} zeroinitializer, {F32} %other",
        f"ret {F32} %r",
    ]
    reduce = "i32 @llvm.vector.reduce.add.v16i32"
    return (
        _dot(target)
        + f"declare {reduce}({I32})\n"
        + define(I32, "bytes_even", f"{I32} %w", block(even))
        + define(I32, "bytes_odd", f"{I32} %w", block(odd))
        + define(I32, "rounded_s16", f"{F32} %v, {F32} %inverse, {F32} %limit", block(rounded))
        + define("i32", "put_pairs", f"{I32} %v, ptr %p", block(put))
        + define("i32", "s16_sum", f"{I32} %v", block([f"%r = call {reduce}({I32} %v)", "ret i32 %r"]))
        + define(F32, "unless", f"{F32} %v, {F32} %is, {F32} %other", block(unless))
        + define(F32, "floats_of", f"{I32} %v", block([f"%r = sitofp {I32} %v to {F32}", f"ret {F32} %r"]))
    )
