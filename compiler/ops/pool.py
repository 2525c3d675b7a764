"""pool_rows: the first row of each sequence, or the mean of its rows.

Rows are added in order, each column separately, so a sequence's result does not depend on others.
"""

from __future__ import annotations

from typing import Any

from llmc.compiler.graph.commands import Site
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.ops.definition import F32, I32, NUM_SAMPLES, Argument, GraphParams, KernelCall, OpDef

_INPUTS = {"x": "f32", "query_start": "i32", "token_seq": "i32", "index": "i32", "out": "f32"}


def _pool_rows(site: Site, graph: GraphParams) -> list[KernelCall]:
    spec = KernelSpec.of("gather", "pool_rows", dim=site.attributes["widths"]["x"], mean=bool(site.attributes["mean"]))
    return [KernelCall(spec, tuple(_INPUTS))]


def _reference(spec: KernelSpec) -> Any:
    from tvm.script.ir_builder import tirx as T

    from llmc.compiler.targets.reference.kernels.frame import Cell, Frame, let

    p = spec.as_dict()
    dim, mean = int(p["dim"]), bool(p["mean"])
    with Frame(spec.symbol(), _INPUTS) as k, k.share_elements(k.scalar(NUM_SAMPLES), dim) as (sample, i):
        last = let(k.raw("index", sample))
        first = let(k.raw("query_start", k.raw("token_seq", last)))
        total = Cell(k.raw("x", first * dim + i))
        if mean:
            with T.serial(first + 1, last + 1) as row:
                total.set(total.get() + k.raw("x", row * dim + i))
            total.set(total.get() / T.Cast("float32", last - first + 1))
        k.store("out", total.get(), sample * dim + i)
    return k.function()


def _cpu(spec: KernelSpec, target: Any) -> Any:
    from tvm.script.ir_builder import tirx as T

    from llmc.compiler.targets.cpu.kernels import builder as b

    p = spec.as_dict()
    dim, mean = int(p["dim"]), bool(p["mean"])
    full, tail = dim // b.WIDTH, dim % b.WIDTH
    pieces = b.ceil_div(dim, b.WIDTH)
    types = {"f32": "float32", "i32": "int32"}
    kernel = b.Kernel.of(spec.symbol(), [(name, types[dtype]) for name, dtype in _INPUTS.items()], target)
    with kernel as k, k.share(k.scalar(NUM_SAMPLES) * pieces) as unit:
        sample, column = b.let(T.truncdiv(unit, pieces)), b.let(T.truncmod(unit, pieces) * b.WIDTH)
        last = b.let(k["index"][sample])
        first = b.let(k["query_start"][k["token_seq"][last]])

        def piece(count: int) -> None:
            total = b.Vectors(1)
            total[0] = b.load_vector(k["x"], first * dim + column, count)
            if mean:
                with T.serial(first + 1, last + 1) as row:
                    total[0] = b.call("add", total[0], b.load_vector(k["x"], row * dim + column, count))
                total[0] = b.call("div", total[0], b.splat(T.Cast("float32", last - first + 1)))
            b.store_vector(k["out"], total[0], sample * dim + column, count)

        if full:
            with b.when(column < full * b.WIDTH):
                piece(b.WIDTH)
        if tail:
            with b.when(column >= full * b.WIDTH):
                piece(tail)
    return kernel.function()


POOL_ROWS = OpDef(
    "pool_rows",
    {
        "x": Argument(2, F32),
        "query_start": Argument(1, I32),
        "token_seq": Argument(1, I32),
        "index": Argument(1, I32),
    },
    lambda call: ((call.shapes["index"][0], call.shapes["x"][1]), F32[0]),
    _pool_rows,
    templates={"reference": _reference, "cpu": _cpu},
)
