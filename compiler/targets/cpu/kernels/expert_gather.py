"""expert_gather: copies the rows of each expert in use to packed activations, in the row tile that suits their count.

Pure data movement. Rows that pad an expert's last row tile are not written.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec, Param
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.expert_index import ExpertIndex, where_held
from llmc.compiler.targets.cpu.target import Target


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    return ("x", *(("columns",) if spec.as_dict().get("ordered") else ()), "chosen", "index", "out")


def build(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    p = spec.as_dict()
    experts, top_k, tile = int(p["experts"]), int(p["top_k"]), int(p["row_tile"])
    words = b.ceil_div(int(p["dim"]), b.lanes_of(str(p["act_dtype"])))
    kernel = b.Kernel.of(spec.symbol(), [(name, "int32") for name in buffers(spec)], target)
    with kernel as k, k.share(b.let(k.scalar(int(p["rows"])) * top_k)) as pair:
        index = ExpertIndex(k["index"], experts)
        token = b.let(T.truncdiv(pair, top_k))
        expert = b.let(k["chosen"][token * top_k + pair])
        with where_held(p, expert):
            number = b.let(index[index.number_at(expert)])
            first, of_expert = b.let(index[index.first_at(number)]), b.let(index[index.tile_at(number)])
            row = b.let(index[index.row_at(pair)] - first)
            of_tile = b.let(T.truncmod(row, of_expert))
            source = b.let(b.packed_position(token, tile, words))
            to = b.let((first + row - of_tile) * words + of_tile)
            if p.get("ordered"):
                _copy_in_order(k, expert, p, (source, tile), (to, of_expert))
            else:
                with T.serial(words) as word:
                    b.store(k["out"], k["x"][source + word * tile], to + word * of_expert)
    return kernel.function()


def _copy_in_order(
    k: b.Kernel, expert: b.Expr, p: dict[str, Param], source: tuple[b.Expr, int], to: tuple[b.Expr, b.Expr]
) -> None:
    """Copies a token's row with its columns permuted: column j is column columns[j] of the token.

    source, to: (offset of a row's first word, stride between words).
    """
    dim, lanes = int(p["dim"]), b.lanes_of(str(p["act_dtype"]))
    columns = b.let(expert * dim)

    def element(index: b.Expr) -> b.Expr:
        """The bits of a column, in the low half of a word."""
        column = b.let(k["columns"][columns + index])
        if lanes == 1:
            return k["x"][source[0] + column * source[1]]
        word = k["x"][source[0] + T.shift_right(column, T.int32(1)) * source[1]]
        down = T.shift_left(T.bitwise_and(column, T.int32(1)), T.int32(4))
        return T.bitwise_and(T.shift_right(word, down), T.int32(0xFFFF))

    with T.serial(dim // lanes) as word:
        value = element(word * lanes)
        if lanes == 2:
            value = T.bitwise_or(value, T.shift_left(element(word * 2 + 1), T.int32(16)))
        b.store(k["out"], value, to[0] + word * to[1])
    if dim % lanes:
        b.store(k["out"], element(T.int32(dim - 1)), to[0] + (dim // lanes) * to[1])
