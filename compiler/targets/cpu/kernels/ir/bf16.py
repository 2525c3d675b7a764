"""bfloat16: rounding to it, and products of pairs."""

from __future__ import annotations

from llmc.compiler.targets.cpu.kernels.ir.text import F32, I1, I16, I32, block, define, splat


def round_bf16() -> str:
    """float32 to bfloat16 bits, round to nearest even; a NaN stays a (quiet) NaN."""
    lines = [
        f"%b = bitcast {F32} %v to {I32}",
        f"%t = lshr {I32} %b, {splat(16)}",
        f"%odd = and {I32} %t, {splat(1)}",
        f"%bias = add {I32} %odd, {splat(32767)}",
        f"%sum = add {I32} %b, %bias",
        f"%up = lshr {I32} %sum, {splat(16)}",
        f"%isnan = fcmp uno {F32} %v, %v",
        f"%quiet = or {I32} %t, {splat(64)}",
        f"%r = select {I1} %isnan, {I32} %quiet, {I32} %up",
        f"%h = trunc {I32} %r to {I16}",
        f"ret {I16} %h",
    ]
    return define(I16, "round_bf16", f"{F32} %v", block(lines))


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
