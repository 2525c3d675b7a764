"""The frame of kernels that apply another kernel to every expert in use, with one function per row tile.

Each function is the kernel of one expert, called with the addresses of its rows and of its part of each weight. Tasks
divide the total cost of all experts in use, in order: reading weights and multiplying rows. So a task computes a
share of one expert, or several whole experts. A single row that chose eight experts can occupy as many tasks as eight
weights have panels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec, Param
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.expert_index import ExpertIndex, row_tiles
from llmc.compiler.targets.cpu.kernels.ir import calls, vector
from llmc.compiler.targets.cpu.target import Target

INDEX = "index"
Part = Callable[[int, str], tirx.PrimFunc]
"""Builds a named function: the kernel of one expert, for rows in tiles of the given size."""


@dataclass(frozen=True)
class Strides:
    """Strides in bytes, by buffer: between rows of activations, and between experts' parts of a weight."""

    of_row: Mapping[str, int]
    of_expert: Mapping[str, int]


def one_expert(spec: KernelSpec, op: str, tile: int, **changes: Param) -> KernelSpec:
    """The spec of kernel `op` for one expert. tile: rows per tile; scalar 0 counts valid rows."""
    params: dict[str, Param] = {name: value for name, value in spec.as_dict().items() if name != "experts"}
    return KernelSpec.of(spec.family, op, **{**params, "rows": 0, "row_tile": tile, **changes})


def for_each_expert(
    spec: KernelSpec, target: Target, buffers: Sequence[tuple[str, str]], part: Part, strides: Strides
) -> tvm.IRModule:
    """Builds the kernel of `spec`. buffers: (name, TIR dtype) in operand order, INDEX among them."""
    p, symbol = spec.as_dict(), spec.symbol()
    names = {tile: f"{symbol}_{tile}" for tile in row_tiles(int(p["row_tile"]))}
    kernel = b.Kernel(symbol, buffers, vector.helpers(target.mcpu) + calls.helpers())
    with kernel as k:
        index = ExpertIndex(k[INDEX], int(p["experts"]))
        scalars = T.alloc_buffer((8,), "int64", scope="local")
        in_use = b.let(index.in_use)
        total = b.let(index[index.cost_at(in_use)])
        with T.serial(in_use) as number:
            # In units of 1 / num_tasks of a row.
            before, after = (b.let(index[index.cost_at(number + i)] * k.num_tasks) for i in range(2))
            begin = b.let(T.max(k.task * total, before) - before)
            end = b.let(T.min((k.task + 1) * total, after) - before)
            with b.when(begin < end):
                expert, first = b.let(index[index.expert_at(number)]), b.let(index[index.first_at(number)])
                tile = b.let(index[index.tile_at(number)])
                b.do("put_scalar", T.address_of(scalars[0]), index[index.rows_at(number)])

                def address(name: str) -> b.Expr:
                    times, stride = (first, strides.of_row) if name in strides.of_row else (expert, strides.of_expert)
                    return T.call_extern("handle", "llmc_behind", b.at(k[name], 0), times, T.int64(stride[name]))

                for size, function in names.items():
                    with b.when(tile == size):
                        places = [address(name) for name, _ in buffers if name != INDEX]
                        share = begin, end, b.let(after - before)
                        T.evaluate(T.call_extern("void", function, *places, T.address_of(scalars[0]), *share))
    parts = {name: part(tile, name) for tile, name in names.items()}
    return tvm.IRModule({symbol: kernel.function(), **parts})
