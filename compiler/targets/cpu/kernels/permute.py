"""permute_columns: permutes the columns of a packed activation. Pure data movement."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.target import Target

_WORDS = 256  # words of a row tile per unit of work: whole cache lines


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    return ("x", "columns", "out")


def build(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    p = spec.as_dict()
    dim, tile, lanes = int(p["dim"]), int(p["row_tile"]), b.lanes_of(str(p["act_dtype"]))
    words, whole = b.ceil_div(dim, lanes), dim // lanes
    pieces = b.ceil_div(words, _WORDS)
    kernel = b.Kernel.of(spec.symbol(), [(name, "int32") for name in buffers(spec)], target)
    with kernel as k:
        x, columns, out = k["x"], k["columns"], k["out"]
        tiles = b.let(T.truncdiv(k.scalar(int(p["rows"])) + (tile - 1), tile))
        with k.share(b.let(tiles * pieces)) as unit:
            base = b.let(T.truncdiv(unit, pieces) * (words * tile))
            first = b.let(T.truncmod(unit, pieces) * _WORDS)

            def at(word: b.Expr) -> b.Expr:
                """A word of every row of the tile; undefined for rows past the last."""
                return base + word * tile if tile == 1 else T.ramp(base + word * tile, 1, tile)

            def rows(value: b.Expr) -> b.Expr:
                return value if tile == 1 else T.broadcast(value, tile)

            def half(element: b.Expr) -> b.Expr:
                """The 16 bits of column columns[element]."""
                column = b.let(columns[element])
                down = T.shift_left(T.bitwise_and(column, T.int32(1)), T.int32(4))
                word = x[at(T.shift_right(column, T.int32(1)))]
                return T.bitwise_and(T.shift_right(word, rows(down)), rows(T.int32(0xFFFF)))

            def move(word: b.Expr, count: int) -> None:
                if lanes == 1:
                    value = x[at(b.let(columns[word]))]
                else:
                    value = half(word * 2)
                    if count == 2:
                        value = T.bitwise_or(value, T.shift_left(half(word * 2 + 1), rows(T.int32(16))))
                b.store(out, value, at(word))

            with T.serial(first, b.let(T.min(first + _WORDS, whole))) as word:
                move(b.let(word), lanes)
            if whole < words:
                with b.when(first + _WORDS >= words):
                    move(b.let(T.int32(whole)), 1)
    return kernel.function()
