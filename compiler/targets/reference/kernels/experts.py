"""Expert kernels: one row per (token, expert) pair, in token order.

The index holds the number of pairs, then each pair's expert. With `some`, a pair whose expert another rank holds
has a row of the last expert's weights, which is not added.
"""

from __future__ import annotations

from contextlib import nullcontext

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec, KernelSpecError
from llmc.compiler.targets.reference.kernels.frame import Cell, Frame, let, row_width, when
from llmc.compiler.targets.reference.kernels.linear import LINEARS
from llmc.compiler.targets.reference.kernels.rows import activated_element, write_activation

_MOST_INDEX = 1 << 31


def expert_order(spec: KernelSpec) -> tirx.PrimFunc:
    p = spec.as_dict()
    top_k = int(p["top_k"])
    with Frame(spec.symbol(), {"chosen": "i32", "index": "i32"}) as k:
        pairs = let(k.scalar(int(p["rows"])) * top_k)
        with k.share(pairs) as pair:
            with when(pair == 0):
                k.put_raw("index", pairs, T.int32(0))
            expert = k.raw("chosen", T.truncdiv(pair, top_k) * top_k + pair)
            if p.get("some"):
                expert = T.min(expert, T.int32(int(p["experts"]) - 1))
            k.put_raw("index", expert, 1 + pair)
    return k.function()


def expert_gather(spec: KernelSpec) -> tirx.PrimFunc:
    p = spec.as_dict()
    top_k, act, dim = int(p["top_k"]), str(p["act_dtype"]), int(p["dim"])
    stride = row_width(dim, act)
    if p.get("ordered"):
        return _gather_in_order(spec, dim, act, top_k)
    with (
        Frame(spec.symbol(), {"x": act, "chosen": "i32", "index": "i32", "out": act}) as k,
        k.share_elements(let(k.scalar(int(p["rows"])) * top_k), stride) as (pair, i),
    ):
        k.put_raw("out", k.raw("x", T.truncdiv(pair, top_k) * stride + i), pair * stride + i)
    return k.function()


def _gather_in_order(spec: KernelSpec, dim: int, act: str, top_k: int) -> tirx.PrimFunc:
    """Copies rows with columns permuted: column j is column columns[j] of the token, per expert."""
    stride = row_width(dim, act)
    inputs = {"x": act, "columns": "i32", "chosen": "i32", "index": "i32"}
    with (
        Frame(spec.symbol(), {**inputs, "out": act}) as k,
        k.share_elements(let(k.scalar(int(spec.as_dict()["rows"])) * top_k), dim) as (pair, i),
    ):
        token = let(T.truncdiv(pair, top_k))
        column = let(k.raw("columns", k.raw("index", 1 + pair) * dim + i))
        write_activation(k, pair, dim, act, i, k.load("x", token * stride + column))
    return k.function()


def check_index(spec: KernelSpec) -> None:
    """Raises KernelSpecError for a weight with more elements than kernel indices can count."""
    p = spec.as_dict()
    if int(p["experts"]) * int(p["n"]) * int(p["k"]) >= _MOST_INDEX:
        raise KernelSpecError(
            f"{p['experts']} experts of {p['n']} rows of {p['k']} are more than kernels of this target count; compile "
            "for a CPU"
        )


def expert_linear(spec: KernelSpec) -> tirx.PrimFunc:
    """The linear kernel; row `pair` uses the weight of its expert. Raises KernelSpecError."""
    check_index(spec)
    return LINEARS[spec.op](spec)


def expert_activate(spec: KernelSpec) -> tirx.PrimFunc:
    """`activate` of the rows of all pairs."""
    p = spec.as_dict()
    dim, act = int(p["dim"]), str(p["act_dtype"])
    with (
        Frame(spec.symbol(), {"x": "f32", "chosen": "i32", "index": "i32", "out": act}) as k,
        k.share_elements(let(k.raw("index", T.int32(0))), dim) as (row, i),
    ):
        write_activation(k, row, dim, act, i, activated_element(k, p, row, i))
    return k.function()


def expert_combine(spec: KernelSpec) -> tirx.PrimFunc:
    p = spec.as_dict()
    dim, top_k = int(p["dim"]), int(p["top_k"])
    dtypes = {"x": "f32", "chosen": "i32", "index": "i32", **({"residual": "f32"} if p["residual"] else {})}
    with (
        Frame(spec.symbol(), {**dtypes, "out": "f32"}) as k,
        k.share_elements(k.scalar(int(p["rows"])), dim) as (row, i),
    ):
        total = Cell(T.float32(0.0))
        with T.serial(top_k) as j:
            weight = T.reinterpret("float32", k.raw("chosen", row * (2 * top_k) + top_k + j))
            held = k.raw("chosen", row * (2 * top_k) + j) < int(p["experts"])
            with when(held) if p.get("some") else nullcontext():
                total.set(total.get() + k.raw("x", (row * top_k + j) * dim + i) * weight)
        value = total.get()
        if p["residual"]:
            value = value + k.raw("residual", row * dim + i)
        k.store("out", value, row * dim + i)
    return k.function()
