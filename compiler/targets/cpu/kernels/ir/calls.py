"""What a kernel needs that calls functions of its own for parts of its buffers."""

from __future__ import annotations

from llmc.compiler.targets.cpu.kernels.ir.text import define


def helpers() -> str:
    """behind: the address so many times so many bytes further. put_scalar: writes a scalar for a function that is
    called; TVM would tell LLVM that no other buffer's loads see it."""
    behind = (
        "  %i = sext i32 %times to i64\n  %o = mul i64 %i, %bytes\n"
        "  %r = getelementptr i8, ptr %p, i64 %o\n  ret ptr %r\n"
    )
    put = "  %w = sext i32 %v to i64\n  store i64 %w, ptr %p, align 8\n  ret i32 0\n"
    return define("ptr", "behind", "ptr %p, i32 %times, i64 %bytes", behind) + define(
        "i32", "put_scalar", "ptr %p, i32 %v", put
    )
