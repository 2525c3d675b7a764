"""adapter_shrink: scale · x Aᵀ of the rows of each tile, 16 ranks a vector.

Each element is one chain of float32 multiply-adds over ascending columns, independent of other rows.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.adapter_slots import Pool, Tile, chosen, share_tiles
from llmc.compiler.targets.cpu.target import Target


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    return ("x", "tiles", "pool", "out")


def build(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    pool, row_tile = Pool(spec), int(spec.as_dict()["row_tile"])
    words, panels = b.ceil_div(pool.columns, pool.lanes), b.ceil_div(pool.rank, b.WIDTH)
    kernel = b.Kernel.of(spec.symbol(), pool.buffers(pool.word), target)
    with kernel as k, share_tiles(k, pool, len(pool.rows) * panels) as (tile, piece):
        part, panel = b.let(T.truncdiv(piece, panels)), b.let(T.truncmod(piece, panels))
        first = b.let(tile.first + chosen(part, list(range(len(pool.a))), pool.a) + panel * (words * b.WIDTH))

        def rows(tile: Tile, count: int) -> None:
            number = [tile.row(i) for i in range(count)]
            source = [b.let(b.packed_position(row, row_tile, words)) for row in number]
            total = b.Vectors(count)
            for i in range(count):
                total[i] = b.splat(0.0)
            with T.serial(words) as w:
                raw = b.kept(k["pool"][T.ramp(first + w * b.WIDTH, 1, b.WIDTH)], pool.word)
                x = [k["x"][source[i] + w * row_tile] for i in range(count)]
                for half in range(pool.lanes):
                    a = b.kept(raw if pool.lanes == 1 else b.halves_of(pool.dtype, raw, half))
                    for i in range(count):
                        of_row = b.splat(x[i]) if pool.lanes == 1 else b.half_in_all(pool.dtype, x[i], half)
                        total[i] = b.call("fma", of_row, a, total[i])
            scale = b.kept(tile.scale(part))
            for i in range(count):
                at = b.let(number[i] * pool.width + piece * b.WIDTH)
                b.store_vector(k["out"], b.call("mul", total[i], scale), at)

        with b.when(panel * b.WIDTH < tile.rank(part)):
            tile.by_count(lambda count: rows(tile, count))
    return kernel.function()
