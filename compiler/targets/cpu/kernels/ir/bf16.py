"""Products of pairs of bfloat16."""

from __future__ import annotations

from llmc.compiler.targets.cpu.kernels.ir.text import F32, I32, block, define


def dot() -> str:
    """dot_bf16: c + a · b, of two bf16 in each lane; narrow_bf16 stores floats as such. Where vectors have AVX-512's
    instructions for both.
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
