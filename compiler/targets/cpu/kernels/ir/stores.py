"""Strided stores of packed activations."""

from __future__ import annotations

from llmc.compiler.targets.cpu.kernels.ir.text import F32, I1, I16, I32, block, constant, define


def put_name(dtype: str, row_tile: int, count: int) -> str:
    """Name of the helper that stores `count` consecutive elements of one row of a packed activation."""
    return f"put_{dtype}_{row_tile}_{count}"


def put(dtype: str, row_tile: int, count: int) -> str:
    """Ignores lanes past `count`; an odd last 16-bit element gets a zero partner."""
    name = put_name(dtype, row_tile, count)
    words = count if dtype == "f32" else (count + 1) // 2
    lanes = 16 if dtype == "f32" else 8
    kind = "float" if dtype == "f32" else "i32"
    body = ""
    if dtype != "f32":
        body += f"  %h0 = call {I16} @llmc_round_{dtype}({F32} %v)\n"
        keep = constant(("true" if lane < count else "false" for lane in range(16)), "i1")
        body += f"  %h = select {I1} {keep}, {I16} %h0, {I16} zeroinitializer\n"
        body += f"  %w = bitcast {I16} %h to <8 x i32>\n"
    source = "%v" if dtype == "f32" else "%w"
    if row_tile == 1 and words == lanes:
        body += f"  store <{lanes} x {kind}> {source}, ptr %p, align 4\n"
    else:
        for lane in range(words):
            body += f"  %e{lane} = extractelement <{lanes} x {kind}> {source}, i32 {lane}\n"
            body += f"  %a{lane} = getelementptr {kind}, ptr %p, i64 {lane * row_tile}\n"
            body += f"  store {kind} %e{lane}, ptr %a{lane}, align 4\n"
    return define("i32", name, f"{F32} %v, ptr %p", body + "  ret i32 0\n")


TILE = (8, 16)
"""(rows, elements of each) that `put_tile` stores."""


def tile_name(dtype: str) -> str:
    """Name of the helper that stores 16 elements of each of 8 rows as a row tile of 16-bit floats."""
    return f"put_tile_{dtype}"


def put_tile(dtype: str) -> str:
    """Stores rows %v0 … %v7 as 8 words of 8 rows.

    First two rows a vector, then words of four rows, then of eight.
    """
    lines = []
    for row in range(8):
        lines.append(f"%h{row} = call {I16} @llmc_round_{dtype}({F32} %v{row})")
        lines.append(f"%w{row} = bitcast {I16} %h{row} to <8 x i32>")
    for row in range(0, 8, 2):
        both = f"<8 x i32> %w{row}, <8 x i32> %w{row + 1}"
        lines.append(f"%p{row} = shufflevector {both}, {I32} {constant(range(16))}")
    for half in range(2):
        order = constant(row * 8 + half * 4 + word for word in range(4) for row in range(4))
        for row in (0, 4):
            lines.append(f"%q{half}{row} = shufflevector {I32} %p{row}, {I32} %p{row + 2}, {I32} {order}")
    for pair in range(4):
        half, word = divmod(2 * pair, 4)
        order = constant(side * 16 + w * 4 + row for w in (word, word + 1) for side in range(2) for row in range(4))
        lines.append(f"%r{pair} = shufflevector {I32} %q{half}0, {I32} %q{half}4, {I32} {order}")
        lines.append(f"%a{pair} = getelementptr i32, ptr %p, i64 {16 * pair}")
        lines.append(f"store {I32} %r{pair}, ptr %a{pair}, align 4")
    args = ", ".join(f"{F32} %v{row}" for row in range(8))
    return define("i32", tile_name(dtype), f"{args}, ptr %p", block([*lines, "ret i32 0"]))
