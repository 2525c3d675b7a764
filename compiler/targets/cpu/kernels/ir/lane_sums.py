"""Sums over the lanes of several vectors at once."""

from __future__ import annotations

from llmc.compiler.targets.cpu.kernels.ir.text import F32, block, constant, define

COUNT = 4
NAME = "lane_sums"
"""Name of the helper that stores the sums of up to 4 vectors as consecutive floats; its last argument is the count."""


def helpers() -> str:
    """One tree per vector: lane i with lane i + 8, then i + 4, 2 and 1.

    The four trees share vectors: two after the first step, all four after the second.
    """
    lines = []
    for pair in range(2):
        a, c = f"%v{2 * pair}", f"%v{2 * pair + 1}"
        low = constant([*range(8), *range(16, 24)])
        high = constant([*range(8, 16), *range(24, 32)])
        lines += [
            f"%l{pair} = shufflevector {F32} {a}, {F32} {c}, <16 x i32> {low}",
            f"%h{pair} = shufflevector {F32} {a}, {F32} {c}, <16 x i32> {high}",
            f"%s{pair} = fadd {F32} %l{pair}, %h{pair}",
        ]
    fours = [8 * vector + lane for vector in range(4) for lane in range(4)]
    lines += [
        f"%l = shufflevector {F32} %s0, {F32} %s1, <16 x i32> {constant(fours)}",
        f"%h = shufflevector {F32} %s0, {F32} %s1, <16 x i32> {constant(lane + 4 for lane in fours)}",
        f"%s = fadd {F32} %l, %h",
    ]
    value, width, eight, four = "%s", 16, "<8 x float>", "<4 x float>"
    for number, (kind, step) in enumerate(((eight, 2), (four, 1))):
        order = [lane for lane in range(width) if lane % (2 * step) < step]
        source = f"<{width} x float>"
        count = f"<{width // 2} x i32>"
        lines += [
            f"%a{number} = shufflevector {source} {value}, {source} undef, {count} {constant(order)}",
            f"%b{number} = shufflevector {source} {value}, {source} undef, {count} {constant(x + step for x in order)}",
            f"%r{number} = fadd {kind} %a{number}, %b{number}",
        ]
        value, width = f"%r{number}", width // 2
    lines += [
        "%n.i = insertelement <4 x i32> undef, i32 %n, i32 0",
        "%ns = shufflevector <4 x i32> %n.i, <4 x i32> undef, <4 x i32> zeroinitializer",
        f"%m = icmp slt <4 x i32> {constant(range(4))}, %ns",
        f"call void @llvm.masked.store.v4f32.p0({four} {value}, ptr %p, i32 4, <4 x i1> %m)",
        "ret i32 0",
    ]
    args = ", ".join(f"{F32} %v{i}" for i in range(COUNT))
    declaration = "\ndeclare void @llvm.masked.store.v4f32.p0(<4 x float>, ptr, i32, <4 x i1>)\n"
    return declaration + define("i32", NAME, f"{args}, ptr %p, i32 %n", block(lines))
