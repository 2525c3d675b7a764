"""expert_combine: the weighted sum of a token's expert results, added in the order of the router's choice."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.expert_index import ExpertIndex, where_held
from llmc.compiler.targets.cpu.target import Target

_BLOCK = 256  # columns per unit of work, so that one row occupies several tasks


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    return ("x", "chosen", "index", *(("residual",) if spec.as_dict()["residual"] else ()), "out")


def build(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    p = spec.as_dict()
    dim, experts, top_k = int(p["dim"]), int(p["experts"]), int(p["top_k"])
    blocks = b.ceil_div(dim, _BLOCK)
    dtypes = {"chosen": "int32", "index": "int32"}
    kernel = b.Kernel.of(spec.symbol(), [(name, dtypes.get(name, "float32")) for name in buffers(spec)], target)
    with kernel as k, k.share(b.let(k.scalar(int(p["rows"])) * blocks)) as unit:
        index = ExpertIndex(k["index"], experts)
        token, block = b.let(T.truncdiv(unit, blocks)), b.let(T.truncmod(unit, blocks))
        total = b.Vectors(1)

        def columns(first: b.Expr, count: b.Expr) -> None:
            total[0] = b.splat(0.0)
            with T.serial(top_k) as j, where_held(p, k["chosen"][token * (2 * top_k) + j]):
                row = b.let(index[index.row_at(token * top_k + j)])
                weight = T.reinterpret("float32", k["chosen"][token * (2 * top_k) + top_k + j])
                result = b.load_vector(k["x"], b.let(row * dim + first), count)
                total[0] = b.call("fma", result, b.splat(weight), total[0])
            value, at = total[0], b.let(token * dim + first)
            if p["residual"]:
                value = b.call("add", value, b.load_vector(k["residual"], at, count))
            b.store_vector(k["out"], value, at, count)

        start = b.let(block * _BLOCK)
        end = b.let(T.min(start + _BLOCK, dim))
        with T.serial(T.truncdiv(end - start, b.WIDTH)) as v:
            columns(b.let(start + v * b.WIDTH), b.WIDTH)
        if dim % b.WIDTH:
            with b.when(end == dim):
                columns(T.int32(dim - dim % b.WIDTH), dim % b.WIDTH)
    return kernel.function()
