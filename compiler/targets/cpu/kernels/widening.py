"""Packed bf16 words to float32, where no instruction multiplies bf16."""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b


def widen_words(x: b.Expr, source: b.Expr, count: b.Expr, wide: b.Expr, low: b.Expr, high: b.Expr) -> None:
    """`count` words of x from `source` on: their low halves to wide[low] and on, the high ones to wide[high] and on."""
    vectors = b.let(T.truncdiv(count, b.WIDTH))
    with T.serial(vectors) as i:
        read = x[T.ramp(source + i * b.WIDTH, 1, b.WIDTH)]
        b.store(wide, b.call("bf16_low", read), T.ramp(low + i * b.WIDTH, 1, b.WIDTH))
        b.store(wide, b.call("bf16_high", read), T.ramp(high + i * b.WIDTH, 1, b.WIDTH))
    with T.serial(vectors * b.WIDTH, count) as i:
        value = x[source + i]
        b.store(wide, T.reinterpret("float32", T.shift_left(value, 16)), low + i)
        b.store(wide, T.reinterpret("float32", T.bitwise_and(value, T.int32(-65536))), high + i)
