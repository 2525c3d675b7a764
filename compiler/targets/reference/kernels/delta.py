"""Layers with a state: a short convolution, and the gated delta rule. Tokens of a sequence are computed in order.

The first token of a step finds the state in the sequence's slot, which has it behind the last token of the step
afterwards. The state behind one of the tokens may also go to another slot.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.reference.kernels.frame import (
    NUM_SEQS,
    Array,
    Cell,
    Expr,
    Frame,
    let,
    when,
)
from llmc.compiler.targets.reference.kernels.functions import sigmoid
from llmc.graphs_format import STATE_FIELDS

INPUTS = {"state_slots": "i32", "query_start": "i32", "positions": "i32"}
NORM_EPS = 1e-6  # as models.delta_ops has it


class Tokens:
    """A sequence's tokens of a step: rows `first` to `end`.

    start: position of the first one; before position 0 there is no state. slot: of the state. keep_row: the state
    behind that row also goes to keep_slot; none of the rows if it is not to.
    """

    def __init__(self, k: Frame, sequence: Expr) -> None:
        self.first, self.end = let(k.raw("query_start", sequence)), let(k.raw("query_start", sequence + 1))
        self.start = let(k.raw("positions", self.first))
        self.slot, keep_tokens, self.keep_slot = (
            let(k.raw("state_slots", sequence * STATE_FIELDS + field)) for field in range(STATE_FIELDS)
        )
        self.keep_row = let(self.first + (keep_tokens - 1 - self.start))


def short_conv(spec: KernelSpec) -> tirx.PrimFunc:
    p = spec.as_dict()
    channels, stride, taps = int(p["channels"]), int(p["stride"]), int(p["taps"])
    bias, silu = bool(p.get("bias")), p.get("activation", "silu") == "silu"
    buffers = {
        "x": "f32",
        "weight": "f32",
        **({"bias": "f32"} if bias else {}),
        **INPUTS,
        "v_pool": "f32",
        "out": "f32",
    }
    with Frame(spec.symbol(), buffers) as k, k.share(k.scalar(NUM_SEQS) * channels) as unit:
        channel = let(T.truncmod(unit, channels))
        tokens, window = Tokens(k, let(T.truncdiv(unit, channels))), Array(taps)

        def place(slot: Expr, i: Expr) -> Expr:
            return (slot * (taps - 1) + i) * channels + channel

        def write(slot: Expr) -> None:
            with T.serial(taps - 1) as i:
                k.put_raw("v_pool", window[i + 1], place(slot, i))

        with T.serial(taps) as i:
            window[i] = T.float32(0.0)
        with when(tokens.start > 0), T.serial(taps - 1) as i:
            window[i + 1] = k.raw("v_pool", place(tokens.slot, i))
        with T.serial(tokens.first, tokens.end) as row:
            with T.serial(taps - 1) as i:
                window[i] = window[i + 1]
            window[taps - 1] = k.raw("x", row * stride + channel)
            total = Cell(k.raw("bias", channel) if bias else T.float32(0.0))
            with T.serial(taps) as i:
                total.set(total.get() + window[i] * k.raw("weight", i * channels + channel))
            result = total.get() * sigmoid(total.get()) if silu else total.get()
            k.store("out", result, row * channels + channel)
            with when(row == tokens.keep_row):
                write(tokens.keep_slot)
        write(tokens.slot)
    return k.function()


def delta_rule(spec: KernelSpec) -> tirx.PrimFunc:
    """A unit is one column of a head's state."""
    p = spec.as_dict()
    heads, key_heads, key_dim, value_dim = (int(p[name]) for name in ("heads", "key_heads", "key_dim", "value_dim"))
    key_size, values = key_heads * key_dim, heads * value_dim
    stride = 2 * key_size + values
    buffers = {"qkv": "f32", "gates": "f32", **INPUTS, "k_pool": "f32", "out": "f32"}
    with Frame(spec.symbol(), buffers) as k, k.share(k.scalar(NUM_SEQS) * values) as unit:
        column = let(T.truncmod(unit, values))
        head, element = let(T.truncdiv(column, value_dim)), let(T.truncmod(column, value_dim))
        of_head = let((T.truncmod(head, key_heads) if p["tiled"] else T.truncdiv(head, heads // key_heads)) * key_dim)
        tokens, state = Tokens(k, let(T.truncdiv(unit, values))), Array(key_dim)

        def place(slot: Expr, i: Expr) -> Expr:
            return ((slot * heads + head) * key_dim + i) * value_dim + element

        def write(slot: Expr) -> None:
            with T.serial(key_dim) as i:
                k.put_raw("k_pool", state[i], place(slot, i))

        with T.serial(key_dim) as i:
            state[i] = T.float32(0.0)
        with when(tokens.start > 0), T.serial(key_dim) as i:
            state[i] = k.raw("k_pool", place(tokens.slot, i))
        with T.serial(tokens.first, tokens.end) as row:
            query = let(row * stride + of_head)
            key = let(query + key_size)
            value = k.raw("qkv", row * stride + 2 * key_size + column)
            writes, kept = (let(k.raw("gates", row * (2 * heads) + i * heads + head), "float32") for i in range(2))
            squares_q, squares_k = Cell(T.float32(0.0)), Cell(T.float32(0.0))
            told = Cell(T.float32(0.0))
            with T.serial(key_dim) as i:
                of_q, of_k = let(k.raw("qkv", query + i), "float32"), let(k.raw("qkv", key + i), "float32")
                squares_q.set(squares_q.get() + of_q * of_q)
                squares_k.set(squares_k.get() + of_k * of_k)
                state[i] = state[i] * kept
                told.set(told.get() + state[i] * of_k)
            unit_q, unit_k = (
                let(T.float32(1.0) / T.sqrt(squares.get() + T.float32(NORM_EPS)), "float32")
                for squares in (squares_q, squares_k)
            )
            change = let((value - told.get() * unit_k) * writes * unit_k, "float32")
            found = Cell(T.float32(0.0))
            with T.serial(key_dim) as i:
                state[i] = state[i] + k.raw("qkv", key + i) * change
                found.set(found.get() + state[i] * k.raw("qkv", query + i))
            k.store("out", found.get() * unit_q * T.float32(key_dim**-0.5), row * values + column)
            with when(row == tokens.keep_row):
                write(tokens.keep_slot)
        write(tokens.slot)
    return k.function()
