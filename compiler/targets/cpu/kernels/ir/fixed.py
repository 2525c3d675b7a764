"""bf16 as 16-bit fixed-point numbers, and products of those. Sums are exact integers."""

from __future__ import annotations

from llmc.compiler.targets.cpu.kernels.ir.text import F32, I32, block, constant, define, kept_sum, splat

_H, _HALF, _I8 = "<32 x i16>", "<16 x i16>", "<8 x i32>"
_LEAST = 15 << 23
"""Smallest exponent field used for a group, so that its scaling factor stays finite."""
_INFINITE = 0x7F800000
_HALVES = tuple(constant(range(first, first + 8)) for first in (0, 8))
_WHOLE = constant(range(16))


def dot() -> str:
    """acc + Σ of 2 products of signed 16-bit numbers, per lane."""
    pairs = "@llvm.x86.avx2.pmadd.wd"
    lines = [f"%{name}h = bitcast {I32} %{name} to {_H}" for name in "wx"]
    for part in (0, 1):
        order = constant(range(16 * part, 16 * part + 16))
        lines += [f"%{n}{part} = shufflevector {_H} %{n}h, {_H} undef, <16 x i32> {order}" for n in "wx"]
        lines.append(f"%p{part} = call {_I8} {pairs}({_HALF} %w{part}, {_HALF} %x{part})")
    lines += [
        f"%p = shufflevector {_I8} %p0, {_I8} %p1, <16 x i32> {_WHOLE}",
        f"%s = add {I32} %acc, %p",
        *kept_sum("%s", "%r"),
        f"ret {I32} %r",
    ]
    declaration = f"declare {_I8} {pairs}({_HALF}, {_HALF})\n"
    return declaration + define(I32, "dot_s16", f"{I32} %acc, {I32} %w, {I32} %x", block(lines))


def pairs(name: str, bits: int) -> str:
    """`name`_0, `name`_1, …: the first, second, … unsigned `bits`-bit number of each 16-bit half of a lane."""
    text = ""
    for i in range(16 // bits):
        lines = [
            f"%h = bitcast {I32} %w to {_H}",
            f"%s = lshr {_H} %h, {splat(i * bits, 'i16', 32)}",
            f"%n = and {_H} %s, {splat((1 << bits) - 1, 'i16', 32)}",
            f"%r = bitcast {_H} %n to {I32}",
            f"ret {I32} %r",
        ]
        text += define(I32, f"{name}_{i}", f"{I32} %w", block(lines))
    return text


def table(values: list[int]) -> str:
    """byte_table: looks up each byte of a lane, all below 16, in a table."""
    shuffle = "@llvm.x86.avx2.pshuf.b"
    of = "<32 x i8>"
    entries = constant(values * 2, "i8")
    lines = [f"%b = bitcast {I32} %w to <64 x i8>"]
    for part in (0, 1):
        order = constant(range(32 * part, 32 * part + 32))
        lines.append(f"%b{part} = shufflevector <64 x i8> %b, <64 x i8> undef, <32 x i32> {order}")
        lines.append(f"%t{part} = call {of} {shuffle}({of} {entries}, {of} %b{part})")
    lines += [
        f"%t = shufflevector {of} %t0, {of} %t1, <64 x i32> {constant(range(64))}",
        f"%r = bitcast <64 x i8> %t to {I32}",
        f"ret {I32} %r",
    ]
    return f"declare {of} {shuffle}({of}, {of})\n" + define(I32, "byte_table", f"{I32} %w", block(lines))


def _exponent() -> list[str]:
    """%e: the exponent field of a group's largest magnitude, in position."""
    larger = f"call {I32} @llvm.smax.v16i32({I32} %x, {I32} {splat(_LEAST)})"
    return [f"%x = and {I32} %m, {splat(_INFINITE)}", f"%e = {larger}"]


def _scales() -> str:
    """fixed_times, fixed_scale: factors of groups with largest magnitudes m, given as float32 bits.

    fixed_times = 2^(14 − e) maps numbers below 2^(e + 1) to below 2^15; fixed_scale is its inverse, NaN if m is NaN or
    infinite.
    """
    times = [*_exponent(), f"%b = sub {I32} {splat((268 << 23) - (1 << 32))}, %e", f"%r = bitcast {I32} %b to {F32}"]
    scale = [
        *_exponent(),
        f"%b = sub {I32} %e, {splat(14 << 23)}",
        f"%f = icmp eq {I32} %x, {splat(_INFINITE)}",
        f"%n = select <16 x i1> %f, {I32} {splat(0x7FC00000)}, {I32} %b",
        f"%r = bitcast {I32} %n to {F32}",
    ]
    text = f"declare {I32} @llvm.smax.v16i32({I32}, {I32})\n"
    for name, lines in (("times", times), ("scale", scale)):
        text += define(F32, f"fixed_{name}", f"{I32} %m", block([*lines, f"ret {F32} %r"]))
    return text


def _magnitude() -> str:
    """fixed_largest: the maximum of m and the magnitudes of both bf16 of w."""
    larger = f"call {I32} @llvm.smax.v16i32"
    lines = [
        f"%l = shl {I32} %w, {splat(16)}",
        f"%a = and {I32} %l, {splat(0x7FFFFFFF)}",
        f"%b = and {I32} %w, {splat(0x7FFF0000)}",
        f"%c = {larger}({I32} %a, {I32} %b)",
        f"%r = {larger}({I32} %m, {I32} %c)",
        f"ret {I32} %r",
    ]
    return define(I32, "fixed_largest", f"{I32} %m, {I32} %w", block(lines))


def _numbers(row_tile: int) -> str:
    """fixed_numbers_R, for tiles of R rows: scales words of bf16 pairs and rounds to nearest even.

    The low halves of two words form one word of the result, their high halves the next.
    """
    rounded = "@llvm.x86.avx.cvt.ps2dq.256"
    lines = [f"%low.b = shl {I32} %w, {splat(16)}", f"%high.b = and {I32} %w, {splat(-65536)}"]
    for half in ("low", "high"):
        lines += [f"%{half}.v = bitcast {I32} %{half}.b to {F32}", f"%{half}.t = fmul {F32} %{half}.v, %times"]
        for part, order in enumerate(_HALVES):
            value = f"%{half}.t{part}"
            lines.append(f"{value} = shufflevector {F32} %{half}.t, {F32} undef, {_I8} {order}")
            lines.append(f"%{half}.n{part} = call {_I8} {rounded}(<8 x float> {value})")
        lines.append(f"%{half}.n = shufflevector {_I8} %{half}.n0, {_I8} %{half}.n1, {I32} {_WHOLE}")
        lines.append(f"%{half} = trunc {I32} %{half}.n to {_HALF}")
    places = []
    for lane in range(16):
        word, row = divmod(lane, row_tile)
        first = word // 2 * 2 * row_tile + row + 16 * (word % 2)
        places += [first, first + row_tile]
    lines += [
        f"%p = shufflevector {_HALF} %low, {_HALF} %high, <32 x i32> {constant(places)}",
        f"%r = bitcast {_H} %p to {I32}",
        f"ret {I32} %r",
    ]
    declaration = f"declare {_I8} {rounded}(<8 x float>)\n"
    return declaration + define(I32, f"fixed_numbers_{row_tile}", f"{I32} %w, {F32} %times", block(lines))


def _folds() -> str:
    """largest_1, sum_1 … largest_8, sum_8: combines each lane with the lane whose number differs in that bit."""
    text = ""
    for bit in (1, 2, 4, 8):
        order = constant(lane ^ bit for lane in range(16))
        other = f"%s = shufflevector {I32} %v, {I32} undef, {I32} {order}"
        for name, step in (
            ("largest", f"call {I32} @llvm.smax.v16i32({I32} %v, {I32} %s)"),
            ("sum", f"add {I32} %v, %s"),
        ):
            text += define(I32, f"{name}_{bit}", f"{I32} %v", block([other, f"%r = {step}", f"ret {I32} %r"]))
    return text


def rows(row_tile: int) -> str:
    """The helpers that convert rows of bf16 to fixed point."""
    return _scales() + _magnitude() + _numbers(row_tile) + _folds()
