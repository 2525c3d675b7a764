"""short_conv: each column of a sequence is convolved with the taps of its channel, then silu or nothing."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels import state_tokens
from llmc.compiler.targets.cpu.target import Target

InputOf = Callable[[b.Expr, int, b.Expr, int], b.Expr]
"""The input of a row for a tap: (row, tap, start within the tile, count)."""
_TILE = 256  # channels per unit of work: the inputs that the taps share stay in L1


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    """v_pool: of a layer without states of heads, its K pool."""
    bias = ("bias",) if spec.as_dict().get("bias") else ()
    return ("x", "weight", *bias, *state_tokens.BUFFERS, "v_pool", "out")


def build(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    p = spec.as_dict()
    channels, stride, taps = (int(p[name]) for name in ("channels", "stride", "taps"))
    bias, silu = bool(p.get("bias")), p.get("activation", "silu") == "silu"
    tiles, tail, before = b.ceil_div(channels, _TILE), channels % b.WIDTH, taps - 1
    types = dict.fromkeys(state_tokens.BUFFERS, "int32")
    kernel = b.Kernel.of(spec.symbol(), [(name, types.get(name, "float32")) for name in buffers(spec)], target)
    with kernel as k:
        seqs = k.scalar(state_tokens.NUM_SEQS)
        window = b.Scratch(max(before, 1) * _TILE, "float32")
        # Sequences have unequal numbers of tokens. All of them have the same tiles, so tasks divide these first.
        with k.share(b.let(seqs * tiles)) as unit:
            channel = b.let(T.truncdiv(unit, seqs) * _TILE)
            width = b.let(T.min(channels - channel, _TILE))
            tokens = state_tokens.Tokens(k, b.let(T.truncmod(unit, seqs)))

            def each_vector(body: Callable[[b.Expr, int], None]) -> None:
                """Calls body(start within the tile, count) for its vectors."""
                with T.serial(T.truncdiv(width, b.WIDTH)) as v:
                    body(b.let(v * b.WIDTH), b.WIDTH)
                if tail:
                    with b.when(channel + width == channels):
                        body(b.let(width - tail), tail)

            def place(slot: b.Expr, i: int) -> b.Expr:
                """Of the tile in input i of the window in a slot."""
                return b.let((slot * before + i) * channels + channel)

            def given(row: b.Expr, at: b.Expr, count: int) -> b.Expr:
                """The input of a row of the step."""
                return b.load_vector(k["x"], b.let(row * stride + channel + at), count)

            def early(row: b.Expr, tap: int, at: b.Expr, count: int) -> b.Expr:
                """The input for a tap, which may lie before the step."""
                if tap == before:
                    return given(row, at, count)
                found, source = b.Vectors(1), b.let(row - before + tap)
                with T.If(source < tokens.first):
                    with T.Then():
                        found[0] = window.vector((source - tokens.first + before) * _TILE + at)
                    with T.Else():
                        found[0] = given(source, at, count)
                return found[0]

            def late(row: b.Expr, tap: int, at: b.Expr, count: int) -> b.Expr:
                """As `early`, of rows with enough others before them."""
                return given(b.let(row - before + tap), at, count)

            def convolve(row: b.Expr, input_of: InputOf) -> None:
                def emit(at: b.Expr, count: int) -> None:
                    total = b.Vectors(1)
                    if bias:
                        total[0] = b.load_vector(k["bias"], b.let(channel + at), count)
                    for tap in range(taps):
                        x = input_of(row, tap, at, count)
                        weight = b.load_vector(k["weight"], b.let(tap * channels + channel + at), count)
                        total[0] = b.call("fma", x, weight, total[0]) if tap or bias else b.call("mul", x, weight)
                    to = b.let(row * channels + channel + at)
                    b.store_vector(k["out"], b.call("silu", total[0]) if silu else total[0], to, count)

                each_vector(emit)
                with b.when(row == tokens.keep_row):
                    leave(tokens.keep_slot, row, input_of)

            def leave(slot: b.Expr, row: b.Expr, input_of: InputOf) -> None:
                """Writes the window behind a row."""
                for i in range(before):
                    keep(place(slot, i), row, i + 1, input_of)

            def keep(to: b.Expr, row: b.Expr, tap: int, input_of: InputOf) -> None:
                """Writes an input that later tokens read."""
                each_vector(
                    lambda at, count: b.store_vector(k["v_pool"], input_of(row, tap, at, count), to + at, count)
                )

            def fetch(source: b.Expr, i: int) -> None:
                """Reads an input that earlier tokens left."""
                each_vector(
                    lambda at, count: window.store(b.load_vector(k["v_pool"], source + at, count), i * _TILE + at)
                )

            # The slot is written while the window is still read: so a copy.
            with T.If(tokens.position > 0):
                with T.Then():
                    for i in range(before):
                        fetch(place(tokens.slot, i), i)
                with T.Else(), T.serial(max(before, 1) * (_TILE // b.WIDTH)) as v:
                    window.store(b.splat(0.0), v * b.WIDTH)
            reached = b.let(T.min(tokens.first + before, tokens.end))
            with T.serial(tokens.first, reached) as row:
                convolve(row, early)
            with T.serial(reached, tokens.end) as row:
                convolve(row, late)
            leave(tokens.slot, b.let(tokens.end - 1), early)
    return kernel.function()
