"""expert_gather: the rows of each expert in use, as packed activations in the row tile that suits their number.

Bits are moved, nothing is computed. Rows that fill an expert's last row tile are not written.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.expert_index import ExpertIndex
from llmc.compiler.targets.cpu.target import Target


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    return ("x", "chosen", "index", "out")


def build(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    p = spec.as_dict()
    experts, top_k, tile = int(p["experts"]), int(p["top_k"]), int(p["row_tile"])
    words = b.ceil_div(int(p["dim"]), b.lanes_of(str(p["act_dtype"])))
    kernel = b.Kernel.of(spec.symbol(), [(name, "int32") for name in buffers(spec)], target)
    with kernel as k, k.share(b.let(k.scalar(int(p["rows"])) * top_k)) as pair:
        index = ExpertIndex(k["index"], experts)
        token = b.let(T.truncdiv(pair, top_k))
        expert = b.let(k["chosen"][token * top_k + pair])
        number = b.let(index[index.number_at(expert)])
        first, of_expert = b.let(index[index.first_at(number)]), b.let(index[index.tile_at(number)])
        row = b.let(index[index.row_at(pair)] - first)
        of_tile = b.let(T.truncmod(row, of_expert))
        source = b.let(b.packed_position(token, tile, words))
        to = b.let((first + row - of_tile) * words + of_tile)
        with T.serial(words) as word:
            b.store(k["out"], k["x"][source + word * tile], to + word * of_expert)
    return kernel.function()
