"""paged_attention: attention over the paged cache, with a variant per kind of cached numbers."""

from __future__ import annotations

from tvm import tirx

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.attention_floats import FloatAttention
from llmc.compiler.targets.cpu.kernels.attention_int8 import Int8Attention
from llmc.compiler.targets.cpu.kernels.attention_walk import Attention
from llmc.compiler.targets.cpu.kernels.ir import vector
from llmc.compiler.targets.cpu.target import Target


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    p = spec.as_dict()
    ends = ("context_lens",) if "both_ways" in p else ()
    inputs = ("q", "block_tables", "token_seq", "positions", *ends, "k_pool", "v_pool")
    own = (*(("slopes",) if "bias" in p else ()), *(("sinks",) if "sinks" in p else ()))
    return (*inputs, *own, *(("partials",) if p["segments"] else ()), "out")


def build(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    of_kind: type[Int8Attention] | type[FloatAttention] = FloatAttention
    if spec.as_dict()["kv_dtype"] == "int8":
        of_kind = Int8Attention
    plan: Attention = of_kind(spec, target)
    pool = plan.pools.word_dtype
    floats = dict.fromkeys(("q", "slopes", "sinks", "partials"), "float32")
    types = {**floats, "k_pool": pool, "v_pool": pool, "out": b.word_dtype(plan.act)}
    counts = {count for _, count in b.pieces(plan.dim)}
    puts = tuple((plan.act, plan.row_tile, count) for count in counts)
    helpers = vector.helpers(target.mcpu, puts=puts) + plan.helpers(target) + plan.shaping.helpers()
    kernel = b.Kernel(spec.symbol(), [(name, types.get(name, "int32")) for name in buffers(spec)], helpers)
    with kernel as k:
        plan.run(k)
    return kernel.function()
