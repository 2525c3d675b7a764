"""adapter_pairs: tiles of the rows of experts that share an adapter and an expert, of tiles of tokens.

One task makes them: numbering pairs is cheaper than sharing the work. Tiles of tokens of one adapter are neighbours.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.expert_index import ExpertIndex
from llmc.compiler.targets.cpu.target import Target


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    return ("tiles", "chosen", "index", "out")


def build(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    p = spec.as_dict()
    size, top_k, experts = int(p["tile_rows"]), int(p["top_k"]), int(p["experts"])
    record = 2 + size
    kernel = b.Kernel.of(spec.symbol(), [(name, "int32") for name in buffers(spec)], target)
    with kernel as k, b.when(k.task == 0):
        index, out = ExpertIndex(k["index"], experts), k["out"]
        made, slot = (T.alloc_buffer((1,), "int32", scope="local") for _ in range(2))
        # Of each expert, the tile of this adapter that has room; −1 for none.
        open_tiles = T.alloc_buffer((experts,), "int32", scope="local")
        b.store(made, T.int32(0), 0)
        b.store(slot, T.int32(-1), 0)
        with T.serial(b.let(k["tiles"][0])) as tile:
            source = b.let(tile * record + 1)
            with b.when(k["tiles"][source] != slot[0]):
                b.store(slot, k["tiles"][source], 0)
                with T.serial(experts) as e:
                    b.store(open_tiles, T.int32(-1), e)
            with T.serial(b.let(k["tiles"][source + 1])) as i, T.serial(top_k) as j:
                row = b.let(k["tiles"][source + 2 + i])
                expert = b.let(k["chosen"][row * (2 * top_k) + j])
                with b.when(open_tiles[expert] < 0):
                    to = b.let(made[0] * record + 1)
                    b.store(out, slot[0] * experts + expert, to)
                    b.store(out, T.int32(0), to + 1)
                    b.store(open_tiles, made[0], expert)
                    b.store(made, made[0] + 1, 0)
                to = b.let(open_tiles[expert] * record + 1)
                count = b.let(out[to + 1])
                # The last row fills the rest of the tile.
                with T.serial(count, size) as filled:
                    b.store(out, index[index.row_at(row * top_k + j)], to + 2 + filled)
                b.store(out, count + 1, to + 1)
                with b.when(count + 1 == size):
                    b.store(open_tiles, T.int32(-1), expert)
        b.store(out, made[0], 0)
    return kernel.function()
