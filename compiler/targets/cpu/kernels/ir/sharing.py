"""Numbers of which a line's word has a part, and a word that lines share the rest."""

from __future__ import annotations

from llmc.compiler.targets.cpu.kernels.ir.text import I32, block, define, splat
from llmc.compiler.targets.cpu.target import Target

_CHOOSE = 0xCA
"""Of three operands: where the first has ones, what the second has, elsewhere the third."""


def second_word(target: Target, name: str, low: int, high: int, shift: int) -> str:
    """`name`: the bits `low` of `others` from a bit of it on, and the bits `high` of w behind a shift. Vectors of 16
    lanes look numbers up by as many bits as they have: there bits above are whatever they are."""
    lines = [
        f"%i = insertelement {I32} undef, i32 %bit, i32 0",
        f"%c = shufflevector {I32} %i, {I32} undef, {I32} zeroinitializer",
        f"%s = lshr {I32} %others, %c",
        f"%t = lshr {I32} %w, {splat(shift)}",
    ]
    declaration = ""
    if target.lanes == 16:
        intrinsic, args = f"{I32} @llvm.x86.avx512.pternlog.d.512", f"{I32} {splat(low)}, {I32} %s, {I32} %t"
        declaration = f"declare {intrinsic}({I32}, {I32}, {I32}, i32)\n"
        lines.append(f"%r = call {intrinsic}({args}, i32 {_CHOOSE})")
    else:
        lines += [f"%l = and {I32} %s, {splat(low)}", f"%h = and {I32} %t, {splat(high)}", f"%r = or {I32} %l, %h"]
    args = f"{I32} %w, {I32} %others, i32 %bit"
    return declaration + define(I32, name, args, block([*lines, f"ret {I32} %r"]))
