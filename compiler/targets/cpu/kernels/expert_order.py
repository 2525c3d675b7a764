"""expert_order: assigns each expert in use its own rows, one per token that chose it, in token order.

With `some`, an expert that another rank holds gets no rows.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.expert_index import ExpertIndex, tile_of, where_held
from llmc.compiler.targets.cpu.target import Target

# Costs of an expert, in rows multiplied by its weight: of any expert, and at least that of reading the weight.
_BEGIN, _READING = 4, 16


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    return ("chosen", "index")


def _cost(rows: b.Expr, largest: int) -> b.Expr:
    """The weight is read while rows are multiplied.

    Rows count in halves of the largest tile, although of a last one three quarters may be multiplied, too. Costs only
    share experts among tasks, so that is near enough.
    """
    half = max(1, largest // 2)
    return T.max(T.truncdiv(rows + (half - 1), half) * half, T.int32(_READING)) + _BEGIN


def build(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    """Runs in one task: numbering tens of thousands of pairs is cheaper than sharing the work."""
    p = spec.as_dict()
    experts, top_k, largest = int(p["experts"]), int(p["top_k"]), int(p["row_tile"])
    unit = int(p["row_unit"])  # an expert's rows begin at a multiple of this
    kernel = b.Kernel.of(spec.symbol(), [(name, "int32") for name in buffers(spec)], target)
    with kernel as k, b.when(k.task == 0):
        index, tokens = ExpertIndex(k["index"], experts), k.scalar(int(p["rows"]))
        in_use, first, cost = (T.alloc_buffer((1,), "int32", scope="local") for _ in range(3))
        following = T.alloc_buffer((experts,), "int32", scope="local")

        def expert_of(token: b.Expr, j: b.Expr) -> b.Expr:
            return b.let(k["chosen"][token * (2 * top_k) + j])

        # The numbers hold counts at first.
        with T.serial(experts) as e:
            index.put(T.int32(0), index.number_at(e))
        with T.serial(tokens) as t, T.serial(top_k) as j:
            expert = expert_of(t, j)
            with where_held(p, expert):
                place = b.let(index.number_at(expert))
                index.put(index[place] + 1, place)
        for cell in (in_use, first, cost):
            b.store(cell, T.int32(0), 0)
        with T.serial(experts) as e:
            rows = b.let(index[index.number_at(e)])
            with b.when(rows > 0):
                number, tile = b.let(in_use[0]), b.let(tile_of(rows, largest))
                index.put(e, index.expert_at(number))
                index.put(first[0], index.first_at(number))
                index.put(rows, index.rows_at(number))
                index.put(tile, index.tile_at(number))
                index.put(cost[0], index.cost_at(number))
                index.put(number, index.number_at(e))
                b.store(following, first[0], number)
                b.store(first, first[0] + T.truncdiv(rows + (unit - 1), unit) * unit, 0)
                b.store(cost, cost[0] + _cost(rows, largest), 0)
                b.store(in_use, number + 1, 0)
        index.put(cost[0], index.cost_at(in_use[0]))
        index.put(in_use[0], 0)
        with T.serial(tokens) as t, T.serial(top_k) as j:
            expert = expert_of(t, j)
            with where_held(p, expert):
                number = b.let(index[index.number_at(expert)])
                index.put(following[number], index.row_at(t * top_k + j))
                b.store(following, following[number] + 1, number)
    return kernel.function()
