"""merge_attention: folds the per-segment results of paged_attention, in order, into a token's result."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.attention_split import segment_keys
from llmc.compiler.targets.cpu.kernels.attention_state import (
    Partials,
    Rows,
    first_key,
    last_key,
    sink_of,
    write_row,
)
from llmc.compiler.targets.cpu.kernels.ir import vector
from llmc.compiler.targets.cpu.target import Target


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    p = spec.as_dict()
    ends = ("token_seq", "context_lens") if "both_ways" in p else ()
    return ("positions", *ends, "partials", *(("sinks",) if "sinks" in p else ()), "out")


def build(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    p = spec.as_dict()
    heads, dim, window, act = int(p["num_heads"]), int(p["head_dim"]), int(p["window"]), str(p["act_dtype"])
    row_tile, chunk, segment = int(p["row_tile"]), int(p.get("chunk", 0)), segment_keys(int(p["block_size"]))
    puts = tuple((act, row_tile, count) for _, count in b.pieces(dim))
    kinds = {**dict.fromkeys(("positions", "token_seq", "context_lens"), "int32"), "out": b.word_dtype(act)}
    types = [(name, kinds.get(name, "float32")) for name in buffers(spec)]
    kernel = b.Kernel(spec.symbol(), types, vector.helpers(target.mcpu, puts=puts))
    with kernel as k:
        partials = Partials(k["partials"], heads, int(p["segments"]), dim)
        result = Rows(1, partials.vectors)
        with k.share(k.scalar(0) * heads) as unit:
            token, head = b.let(T.truncdiv(unit, heads)), b.let(T.truncmod(unit, heads))
            last = b.let(k["positions"][token])
            first = first_key(last, window, chunk)
            if "both_ways" in p:
                last = last_key(last, k["context_lens"][k["token_seq"][token]], window)
            segment0, segment1 = b.let(T.truncdiv(first, segment)), b.let(T.truncdiv(last, segment) + 1)
            with b.when(segment1 - segment0 > 1):
                result.clear(1)
                with T.serial(segment0, segment1) as s:
                    partials.fold_into(result, 0, partials.at(token, head, s))
                sink = sink_of(k, head) if "sinks" in p else None
                write_row(k["out"], result, 0, token, head, heads, dim, act, row_tile, sink)
    return kernel.function()
