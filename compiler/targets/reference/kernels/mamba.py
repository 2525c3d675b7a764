"""selective_state: Mamba-2's states over the tokens of each sequence, in order. `delta.py` says where states lie."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.reference.kernels.delta import INPUTS, Tokens
from llmc.compiler.targets.reference.kernels.frame import NUM_SEQS, Array, Cell, Expr, Frame, let, when


def selective_state(spec: KernelSpec) -> tirx.PrimFunc:
    """A unit is one row of a head's state."""
    p = spec.as_dict()
    heads, head_dim, groups, state_size = (int(p[name]) for name in ("heads", "head_dim", "groups", "state_size"))
    size = heads * head_dim
    stride = size + 2 * groups * state_size
    buffers = {"xbc": "f32", "steps": "f32", "skip": "f32", **INPUTS, "k_pool": "f32", "out": "f32"}
    with Frame(spec.symbol(), buffers) as k, k.share(k.scalar(NUM_SEQS) * size) as unit:
        place = let(T.truncmod(unit, size))
        head = let(T.truncdiv(place, head_dim))
        of_group = let(T.truncdiv(head, heads // groups) * state_size + size)
        tokens, state = Tokens(k, let(T.truncdiv(unit, size))), Array(state_size)

        def in_pool(slot: Expr, i: Expr) -> Expr:
            return (slot * size + place) * state_size + i

        def write(slot: Expr) -> None:
            with T.serial(state_size) as i:
                k.put_raw("k_pool", state[i], in_pool(slot, i))

        with T.serial(state_size) as i:
            state[i] = T.float32(0.0)
        with when(tokens.start > 0), T.serial(state_size) as i:
            state[i] = k.raw("k_pool", in_pool(tokens.slot, i))
        with T.serial(tokens.first, tokens.end) as row:
            step, kept = (let(k.raw("steps", row * (2 * heads) + i * heads + head), "float32") for i in range(2))
            x = let(k.raw("xbc", row * stride + place), "float32")
            writes = let(row * stride + of_group)
            reads = let(writes + groups * state_size)
            added, found = let(x * step, "float32"), Cell(T.float32(0.0))
            with T.serial(state_size) as i:
                state[i] = state[i] * kept + added * k.raw("xbc", writes + i)
                found.set(found.get() + state[i] * k.raw("xbc", reads + i))
            k.store("out", found.get() + x * k.raw("skip", head), row * size + place)
            with when(row == tokens.keep_row):
                write(tokens.keep_slot)
        write(tokens.slot)
    return k.function()
