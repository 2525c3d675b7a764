"""Helpers of kernels that call their own functions on parts of buffers."""

from __future__ import annotations

from llmc.compiler.targets.cpu.kernels.ir.text import define


def helpers() -> str:
    """behind: an address plus index · stride bytes. put_scalar: stores a scalar for a called function.

    With TVM's own store, LLVM would assume that loads of other buffers do not see it.
    """
    behind = (
        "  %i = sext i32 %times to i64\n  %o = mul i64 %i, %bytes\n"
        "  %r = getelementptr i8, ptr %p, i64 %o\n  ret ptr %r\n"
    )
    put = "  %w = sext i32 %v to i64\n  store i64 %w, ptr %p, align 8\n  ret i32 0\n"
    return define("ptr", "behind", "ptr %p, i32 %times, i64 %bytes", behind) + define(
        "i32", "put_scalar", "ptr %p, i32 %v", put
    )
