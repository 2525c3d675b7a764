"""Numbers of 6 bits, two in a half of a word, a third in another word and the fourth across both."""

from __future__ import annotations

from llmc.compiler.targets.cpu.kernels.ir.sharing import second_word
from llmc.compiler.targets.cpu.kernels.ir.text import F32, I32, block, define, splat
from llmc.compiler.targets.cpu.target import Target

_OTHERS, _OWN = 0x00FF00FF, 0x0F000F00
"""Bits of both halves that come from the word that lines share, and from a line's."""
_PAIRS = "<32 x i16>"


def _number() -> str:
    """six: the low 6 bits of each lane, and a float."""
    lines = [
        f"%n = and {I32} %w, {splat(63)}",
        f"%f = sitofp {I32} %n to {F32}",
        f"%r = fadd {F32} %f, %plus",
        f"ret {F32} %r",
    ]
    return define(F32, "six", f"{I32} %w, {F32} %plus", block(lines))


def _looked_up() -> str:
    """looked_up_six_0, _1: of each 16-bit half of a lane, the bf16 in a table of 64 whose number begins at bit 0 or
    6."""
    table = f"{_PAIRS} @llvm.x86.avx512.vpermi2var.hi.512"
    text = f"declare {table}({_PAIRS}, {_PAIRS}, {_PAIRS})\n"
    for i in (0, 1):
        lines = [
            *(f"%{name}h = bitcast {I32} %{name} to {_PAIRS}" for name in ("w", "low", "high")),
            f"%n = lshr {_PAIRS} %wh, {splat(6 * i, 'i16', 32)}",
            f"%p = call {table}({_PAIRS} %lowh, {_PAIRS} %n, {_PAIRS} %highh)",
            f"%r = bitcast {_PAIRS} %p to {I32}",
            f"ret {I32} %r",
        ]
        text += define(I32, f"looked_up_six_{i}", f"{I32} %w, {I32} %low, {I32} %high", block(lines))
    return text


def helpers(target: Target) -> str:
    """sixes_second: of both halves of each lane two numbers, at bits 0 and 6; six; and, where vectors have 16 lanes,
    looked_up_six_0 and _1. `fixed.pairs` has sixes_0 and _1."""
    second = second_word(target, "sixes_second", _OTHERS, _OWN, 4)
    return second + _number() + (_looked_up() if target.lanes == 16 else "")
