"""5-bit numbers: three in each half of a word, the fourth spread across two words."""

from __future__ import annotations

from llmc.compiler.targets.cpu.kernels.ir.text import F32, I32, block, define, splat
from llmc.compiler.targets.cpu.target import Target

_LOW, _TOP = 0x000F000F, 0x00100010
_CHOOSE = 0xCA
"""Truth table of a ternary logic op: where the first operand has ones take the second, elsewhere the third."""


def _last(target: Target) -> str:
    """fives_3: for both halves of each lane, the number whose top bit is the highest bit of w's half.

    Its other bits are in `others`, from a given bit of the half. With in-register tables, which use 5 bits of a lane,
    higher bits are undefined.
    """
    lines = [
        f"%i = insertelement {I32} undef, i32 %bit, i32 0",
        f"%c = shufflevector {I32} %i, {I32} undef, {I32} zeroinitializer",
        f"%s = lshr {I32} %others, %c",
        f"%t = lshr {I32} %w, {splat(11)}",
    ]
    declaration = ""
    if target.lanes == 16:
        intrinsic, args = f"{I32} @llvm.x86.avx512.pternlog.d.512", f"{I32} {splat(_LOW)}, {I32} %s, {I32} %t"
        declaration = f"declare {intrinsic}({I32}, {I32}, {I32}, i32)\n"
        lines.append(f"%r = call {intrinsic}({args}, i32 {_CHOOSE})")
    else:
        lines += [
            f"%l = and {I32} %s, {splat(_LOW)}",
            f"%h = and {I32} %t, {splat(_TOP)}",
            f"%r = or {I32} %l, %h",
        ]
    args = f"{I32} %w, {I32} %others, i32 %bit"
    return declaration + define(I32, "fives_3", args, block([*lines, f"ret {I32} %r"]))


def _number(target: Target) -> str:
    """five: table[low 5 bits of each lane], for a 32-number table with constant step, given as two parts."""
    args = f"{I32} %w, {F32} %low, {F32} %high"
    if target.lanes == 16:
        intrinsic = f"{F32} @llvm.x86.avx512.vpermi2var.ps.512"
        lines = [f"%r = call {intrinsic}({F32} %low, {I32} %w, {F32} %high)", f"ret {F32} %r"]
        return f"declare {intrinsic}({F32}, {I32}, {F32})\n" + define(F32, "five", args, block(lines))
    # Its first number determines the table.
    lines = [
        f"%n = and {I32} %w, {splat(31)}",
        f"%f = sitofp {I32} %n to {F32}",
        f"%z = shufflevector {F32} %low, {F32} undef, {I32} zeroinitializer",
        f"%r = fadd {F32} %f, %z",
        f"ret {F32} %r",
    ]
    return define(F32, "five", args, block(lines))


def helpers(target: Target) -> str:
    """fives_3 and five; `fixed.pairs` has the other pairs."""
    return _last(target) + _number(target)
