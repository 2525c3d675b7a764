"""merge_attention: a group folds the partitions of one head of a token, in order, by `softmax.py`."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.gpu.attention_split import PARTITION, partial_floats
from llmc.compiler.targets.gpu.kernels.groups import Shared, calling, sync
from llmc.compiler.targets.gpu.kernels.softmax import LEAST, Sums, folded, joined, later_maximum, scaled
from llmc.compiler.targets.gpu.launch import ITEMS
from llmc.compiler.targets.reference.kernels.attention import seen_keys
from llmc.compiler.targets.reference.kernels.frame import NUM_TOKENS, Cell, Expr, Frame, let, when
from llmc.compiler.targets.reference.kernels.rows import write_activation


def merge_attention(spec: KernelSpec) -> tirx.PrimFunc:
    p = spec.as_dict()
    heads, dim, segments, act = int(p["num_heads"]), int(p["head_dim"]), int(p["segments"]), str(p["act_dtype"])
    floats, sinks = partial_floats(dim), "sinks" in p
    ends = {"token_seq": "i32", "context_lens": "i32"} if "both_ways" in p else {}
    own = {"partials": "f32", **({"sinks": "f32"} if sinks else {})}
    with Frame(spec.symbol(), {"positions": "i32", **ends, **own, "out": act}) as k:
        item, sums = calling(k).item, Sums(k, 1, dim)
        most, added, keep, gain = (Shared(ITEMS) for _ in range(4))
        with calling(k).share_groups(let(k.scalar(NUM_TOKENS) * heads)) as unit:
            token, head = let(T.truncdiv(unit, heads)), let(T.truncmod(unit, heads))
            first, last = seen_keys(k, p, token)
            begin, end = let(T.truncdiv(first, PARTITION)), let(T.truncdiv(last, PARTITION) + 1)
            top, total = Cell(T.float32(LEAST)), Cell(T.float32(0.0))
            sums.clear()
            with T.serial(let(T.truncdiv(end - begin + (ITEMS - 1), ITEMS))) as turn:
                start = let(begin + turn * ITEMS)
                count = let(T.min(end - start, ITEMS))
                base = let((unit * segments + start) * floats)
                sync()
                with when(item < count):
                    most[item] = k.raw("partials", base + (item * floats + dim))
                    added[item] = k.raw("partials", base + (item * floats + (dim + 1)))
                sync()
                # Each item finds the maxima before and behind its own partition by itself.
                before = Cell(top.get())
                with T.serial(let(T.min(item, count))) as j:
                    before.set(later_maximum(before.get(), most[j]))
                with when(item < count):
                    after = later_maximum(before.get(), most[item])
                    keep[item] = scaled(before.get(), after)
                    gain[item] = scaled(most[item], after)
                with T.serial(count) as j:
                    top.set(later_maximum(top.get(), most[j]))
                sync()
                with T.serial(count) as j:
                    kept, gained, at = let(keep[j], "float32"), let(gain[j], "float32"), let(base + j * floats)
                    total.set(folded(total.get(), kept, added[j], gained))

                    def fold(element: Expr, cell: Cell) -> None:
                        cell.set(folded(cell.get(), kept, k.raw("partials", at + element), gained))

                    sums.each(0, fold)
            change = None
            if sinks:
                sink = let(k.raw("sinks", head), "float32")
                behind = later_maximum(top.get(), sink)
                change = scaled(top.get(), behind)
                total.set(joined(total.get(), change, scaled(sink, behind)))

            def write(element: Expr, cell: Cell) -> None:
                value = cell.get() if change is None else let(cell.get() * change, "float32")
                write_activation(k, token, heads * dim, act, let(head * dim + element), value / total.get())

            sums.each(0, write)
    return k.function()
