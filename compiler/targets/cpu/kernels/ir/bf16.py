"""Products of pairs of bfloat16."""

from __future__ import annotations

from llmc.compiler.targets.cpu.kernels.ir.text import F32, I32, block, constant, define, splat

_PAIRS = "<32 x i16>"


def dot() -> str:
    """dot_bf16: c + a · b over two bf16 per lane. narrow_bf16: rounds floats to bf16 and stores them.

    Requires vectors with AVX-512's instructions for both.
    """
    pairs, intrinsic = "<32 x bfloat>", "@llvm.x86.avx512bf16.dpbf16ps.512"
    multiply = [
        f"%x = bitcast {I32} %a to {pairs}",
        f"%y = bitcast {I32} %b to {pairs}",
        f"%r = call {F32} {intrinsic}({F32} %c, {pairs} %x, {pairs} %y)",
        f"ret {F32} %r",
    ]
    narrow = [
        f"%h = fptrunc {F32} %v to <16 x bfloat>",
        "store <16 x bfloat> %h, ptr %p, align 32",
        "ret i32 0",
    ]
    return (
        f"\ndeclare {F32} {intrinsic}({F32}, {pairs}, {pairs})\n"
        + define(F32, "dot_bf16", f"{F32} %c, {I32} %a, {I32} %b", block(multiply))
        + define("i32", "narrow_bf16", f"{F32} %v, ptr %p", block(narrow))
    )


def pairs_of_rows(row_tile: int) -> str:
    """pairs_of_rows_R: words of two bf16 from `row_tile` rows; two words of a row become their low and their high
    halves.

    folded_1 … folded_8: each lane plus the lane whose number differs in that bit.
    """
    order = []
    for lane in range(16):
        word, row = divmod(lane, row_tile)
        first = 2 * (word // 2 * 2 * row_tile + row) + word % 2
        order += [first, first + 2 * row_tile]
    lines = [
        f"%h = bitcast {I32} %w to {_PAIRS}",
        f"%s = shufflevector {_PAIRS} %h, {_PAIRS} undef, <32 x i32> {constant(order)}",
        f"%r = bitcast {_PAIRS} %s to {I32}",
        f"ret {I32} %r",
    ]
    text = define(I32, f"pairs_of_rows_{row_tile}", f"{I32} %w", block(lines))
    for bit in (1, 2, 4, 8):
        others = constant(lane ^ bit for lane in range(16))
        lines = [
            f"%s = shufflevector {F32} %v, {F32} undef, {I32} {others}",
            f"%r = fadd {F32} %v, %s",
            f"ret {F32} %r",
        ]
        text += define(F32, f"folded_{bit}", f"{F32} %v", block(lines))
    return text


def looked_up_pairs() -> str:
    """looked_up_0, _4, _5, _8, _10, _12: the bf16 table entry whose index starts at that bit of each 16-bit half of a
    lane.

    At bit 12 an index has four bits, 0 … 15; elsewhere it has a fifth bit above them.
    """
    table = "@llvm.x86.avx512.permvar.hi.512"
    text = f"declare {_PAIRS} {table}({_PAIRS}, {_PAIRS})\n"
    for bit in (0, 4, 5, 8, 10, 12):
        lines = [
            f"%h = bitcast {I32} %w to {_PAIRS}",
            f"%t = bitcast {I32} %table to {_PAIRS}",
            f"%n = lshr {_PAIRS} %h, {splat(bit, 'i16', 32)}",
            f"%p = call {_PAIRS} {table}({_PAIRS} %t, {_PAIRS} %n)",
            f"%r = bitcast {_PAIRS} %p to {I32}",
            f"ret {I32} %r",
        ]
        text += define(I32, f"looked_up_{bit}", f"{I32} %w, {I32} %table", block(lines))
    return text


def pair_of_floats() -> str:
    """bf16_pair: packs floats that are exact in bf16 into pairs, `a` in the low half."""
    order = constant(32 * high + 2 * lane + 1 for lane in range(16) for high in (0, 1))
    lines = [
        f"%x = bitcast {F32} %a to {_PAIRS}",
        f"%y = bitcast {F32} %b to {_PAIRS}",
        f"%h = shufflevector {_PAIRS} %x, {_PAIRS} %y, <32 x i32> {order}",
        f"%r = bitcast {_PAIRS} %h to {I32}",
        f"ret {I32} %r",
    ]
    return define(I32, "bf16_pair", f"{F32} %a, {F32} %b", block(lines))
