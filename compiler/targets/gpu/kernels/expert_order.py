"""expert_order for tensor cores: besides each pair's expert, the pairs of each expert (`row_tiles.ExpertIndex`).

A group lists an expert's pairs: each item those of every 64th pair. Pairs whose expert another rank holds are in no
list, so nothing computes them.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.gpu.kernels.groups import Shared, calling, some, sync
from llmc.compiler.targets.gpu.launch import ITEMS
from llmc.compiler.targets.reference.kernels.frame import Cell, Expr, Frame, let, when


def expert_order(spec: KernelSpec) -> tirx.PrimFunc:
    p = spec.as_dict()
    top_k, experts = int(p["top_k"]), int(p["experts"])
    with Frame(spec.symbol(), {"chosen": "i32", "index": "i32"}) as k:
        item, pairs = calling(k).item, let(k.scalar(int(p["rows"])) * top_k)
        of_items, below_items = Shared(ITEMS, "int32"), Shared(ITEMS, "int32")

        def chosen(pair: Expr) -> Expr:
            return let(k.raw("chosen", T.truncdiv(pair, top_k) * top_k + pair))

        with calling(k).share_groups(T.int32(experts)) as expert:
            own, below = Cell(T.int32(0), "int32"), Cell(T.int32(0), "int32")
            with some(k, pairs) as pair:
                found = chosen(pair)
                own.set(own.get() + T.Cast("int32", found == expert))
                below.set(below.get() + T.Cast("int32", found < expert))
                with when(T.min(found, experts - 1) == expert):
                    k.put_raw("index", expert, 1 + pair)
            sync()  # all items have read those of the expert before
            of_items[item], below_items[item] = own.get(), below.get()
            sync()
            first, before, total = (Cell(T.int32(0), "int32") for _ in range(3))
            with T.serial(ITEMS) as other:
                count = let(of_items[other])
                first.set(first.get() + below_items[other])
                total.set(total.get() + count)
                before.set(before.get() + count * T.Cast("int32", other < item))
            at = Cell(let(1 + pairs + first.get() + before.get()), "int32")
            with some(k, pairs) as pair, when(chosen(pair) == expert):
                k.put_raw("index", pair, at.get())
                at.set(at.get() + 1)
            with when(item == 0):
                starts = let(1 + 2 * pairs)
                k.put_raw("index", first.get(), starts + expert)
                with when(expert == experts - 1):
                    k.put_raw("index", first.get() + total.get(), starts + experts)
                    k.put_raw("index", pairs, T.int32(0))
    return k.function()
