"""AMX's tile registers: eight, all configured as 16 lines of 64 bytes.

Instructions name registers by constants, so each register has helpers of its own. A kernel configures the registers
before use and releases them before it returns; the runtime's threads know nothing of tiles.
"""

from __future__ import annotations

from collections.abc import Iterable

from llmc.compiler.targets.cpu.kernels.ir.text import I32, block, constant, define

LINES = 16
"""Lines of a tile register: rows of activations and sums, or words of K of weights."""
LINE_BYTES = 64
WORDS = LINE_BYTES // 4
"""4-byte words in a line."""
_REGISTERS = 8
_DOTS = {"s8u8": "tdpbsud", "bf16": "tdpbf16ps"}

Dot = tuple[int, int, int]
"""Register numbers of sums, rows and columns."""


def _shape() -> list[int]:
    """The bytes of a tile configuration: palette 1, then bytes per line (16 bits) and lines (8 bits) of each
    register."""
    of_register = [LINE_BYTES, 0]
    return [1] + [0] * 15 + of_register * _REGISTERS + [0] * 16 + [LINES] * _REGISTERS + [0] * 8


def _copy_few_rows(row_tile: int, words: int) -> str:
    """`_copy_rows` for 1 or 2 rows."""
    count = row_tile * words
    read = f"<{count} x i32>"
    body = [f"%v = load {read}, ptr %from, align 4"]
    for row in range(row_tile):
        order = constant(word * row_tile + row if word < words else count for word in range(WORDS))
        body.append(f"%r{row} = shufflevector {read} %v, {read} zeroinitializer, {I32} {order}")
        body.append(f"%r{row}.p = getelementptr i32, ptr %to, i64 {row * WORDS}")
        body.append(f"store {I32} %r{row}, ptr %r{row}.p, align 64")
    return define("i32", f"tile_rows_{words}", "ptr %from, ptr %to", block([*body, "ret i32 0"]))


def _copy_rows(row_tile: int, words: int) -> str:
    """Copies `words` words of K of a row tile, [word][row], to lines of a tile register, [row][word].

    The remaining words of these lines become 0.
    """
    if row_tile < 4:
        return _copy_few_rows(row_tile, words)
    four = "<4 x i32>"
    body = []
    for first in range(0, row_tile, 4):
        for word in range(4):
            parts = []
            for lane in range(4):
                at, name = lane * 4 + word, f"%w{first}.{word}.{lane}"
                if at < words:
                    body.append(f"{name}.p = getelementptr i32, ptr %from, i64 {at * row_tile + first}")
                    body.append(f"{name} = load {four}, ptr {name}.p, align 4")
                parts.append(name if at < words else "zeroinitializer")
            lower, upper, whole = (f"%{kind}{first}.{word}" for kind in ("l", "u", "z"))
            eight = constant(range(8))
            body.append(f"{lower} = shufflevector {four} {parts[0]}, {four} {parts[1]}, <8 x i32> {eight}")
            body.append(f"{upper} = shufflevector {four} {parts[2]}, {four} {parts[3]}, <8 x i32> {eight}")
            body.append(f"{whole} = shufflevector <8 x i32> {lower}, <8 x i32> {upper}, {I32} {constant(range(16))}")
        for pair, (even, odd) in enumerate(((0, 1), (2, 3))):
            for half in (0, 1):
                order = [lane * 4 + half * 2 + i + side for lane in range(4) for i in (0, 1) for side in (0, 16)]
                body.append(
                    f"%t{first}.{pair}.{half} = shufflevector {I32} %z{first}.{even}, {I32} %z{first}.{odd}, "
                    f"{I32} {constant(order)}"
                )
        for row in range(4):
            half, start = divmod(row, 2)
            order = [lane * 4 + start * 2 + i + side for lane in range(4) for side in (0, 16) for i in (0, 1)]
            name = f"%r{first}.{row}"
            body.append(
                f"{name} = shufflevector {I32} %t{first}.0.{half}, {I32} %t{first}.1.{half}, {I32} {constant(order)}"
            )
            body.append(f"{name}.p = getelementptr i32, ptr %to, i64 {(first + row) * WORDS}")
            body.append(f"store {I32} {name}, ptr {name}.p, align 64")
    return define("i32", f"tile_rows_{words}", "ptr %from, ptr %to", block([*body, "ret i32 0"]))


def instructions(kind: str, dots: Iterable[Dot]) -> str:
    """Helpers: tile_configure and tile_release; per register N, tile_zero_N, tile_load_N and tile_store_N.

    Loads and stores take (address, bytes between lines). For each of `dots`, tile_dot_KIND_C_A_B computes C += A · B.
    kind: s8u8 multiplies signed by unsigned bytes, four a lane; bf16 multiplies bfloat16, two a lane.
    """
    shape = constant(_shape(), "i8")
    parts = [
        f"@llmc_tile_shape = private unnamed_addr constant <64 x i8> {shape}, align 64\n"
        "declare void @llvm.x86.ldtilecfg(ptr)\n"
        "declare void @llvm.x86.tilerelease()\n"
        "declare void @llvm.x86.tilezero(i8)\n"
        "declare void @llvm.x86.tileloadd64(i8, ptr, i64)\n"
        "declare void @llvm.x86.tilestored64(i8, ptr, i64)\n"
        f"declare void @llvm.x86.{_DOTS[kind]}(i8, i8, i8)\n"
    ]

    def helper(name: str, args: str, lines: list[str]) -> None:
        parts.append(define("i32", f"tile_{name}", args, block([*lines, "ret i32 0"])))

    helper("configure", "", ["call void @llvm.x86.ldtilecfg(ptr @llmc_tile_shape)"])
    helper("release", "", ["call void @llvm.x86.tilerelease()"])
    for n in range(_REGISTERS):
        helper(f"zero_{n}", "", [f"call void @llvm.x86.tilezero(i8 {n})"])
        for name, intrinsic in (("load", "tileloadd64"), ("store", "tilestored64")):
            call = f"call void @llvm.x86.{intrinsic}(i8 {n}, ptr %p, i64 %s)"
            helper(f"{name}_{n}", "ptr %p, i32 %stride", ["%s = sext i32 %stride to i64", call])
    for c, a, b in sorted(set(dots)):
        helper(f"dot_{kind}_{c}_{a}_{b}", "", [f"call void @llvm.x86.{_DOTS[kind]}(i8 {c}, i8 {a}, i8 {b})"])
    return "".join(parts)


def rows_helpers(row_tile: int, words: Iterable[int]) -> str:
    """tile_rows_N for each word count N, 1 to WORDS: (first word of a row tile, its first line)."""
    return "".join(_copy_rows(row_tile, count) for count in sorted(set(words)))
