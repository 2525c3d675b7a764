"""Numbers of 5 bits, three in a half of a word and the fourth across two words."""

from __future__ import annotations

from llmc.compiler.targets.cpu.kernels.ir.sharing import second_word
from llmc.compiler.targets.cpu.kernels.ir.text import F32, I32, block, define, splat
from llmc.compiler.targets.cpu.target import Target

_LOW, _TOP = 0x000F000F, 0x00100010


def _number(target: Target) -> str:
    """five: table[the low 5 bits of each lane], a table of 32 numbers one apart, in two parts."""
    args = f"{I32} %w, {F32} %low, {F32} %high"
    if target.lanes == 16:
        intrinsic = f"{F32} @llvm.x86.avx512.vpermi2var.ps.512"
        lines = [f"%r = call {intrinsic}({F32} %low, {I32} %w, {F32} %high)", f"ret {F32} %r"]
        return f"declare {intrinsic}({F32}, {I32}, {F32})\n" + define(F32, "five", args, block(lines))
    # Its first number is all that it tells.
    lines = [
        f"%n = and {I32} %w, {splat(31)}",
        f"%f = sitofp {I32} %n to {F32}",
        f"%z = shufflevector {F32} %low, {F32} undef, {I32} zeroinitializer",
        f"%r = fadd {F32} %f, %z",
        f"ret {F32} %r",
    ]
    return define(F32, "five", args, block(lines))


def helpers(target: Target) -> str:
    """fives_3: of both halves of each lane the number whose top bit is the highest of w's half; and five. `fixed.pairs`
    has the other pairs."""
    return second_word(target, "fives_3", _LOW, _TOP, 11) + _number(target)
