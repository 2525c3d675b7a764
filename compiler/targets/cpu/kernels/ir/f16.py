"""Half precision: rounding to it, and the halves of words as float32. All CPUs here convert it."""

from __future__ import annotations

from llmc.compiler.targets.cpu.kernels.ir.text import F32, I16, I32, block, constant, define


def round_f16() -> str:
    """float32 to the bits of the nearest half, ties to even; what is too large becomes infinite."""
    lines = [f"%h = fptrunc {F32} %v to <16 x half>", f"%r = bitcast <16 x half> %h to {I16}", f"ret {I16} %r"]
    return define(I16, "round_f16", f"{F32} %v", block(lines))


def halves() -> str:
    """f16_low, f16_high: of the words of a vector."""
    text = ""
    for place, name in enumerate(("low", "high")):
        order = constant(range(place, 32, 2))
        lines = [
            f"%b = bitcast {I32} %w to <32 x half>",
            f"%e = shufflevector <32 x half> %b, <32 x half> undef, <16 x i32> {order}",
            f"%r = fpext <16 x half> %e to {F32}",
            f"ret {F32} %r",
        ]
        text += define(F32, f"f16_{name}", f"{I32} %w", block(lines))
    return text
