"""adapter_pick: the column of A of each row's token, times the scale, 16 ranks a vector."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.adapter_slots import Pool, share_tiles
from llmc.compiler.targets.cpu.target import Target


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    return ("ids", "tiles", "pool", "out")


def build(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    pool = Pool(spec)
    dtypes = {"pool": pool.word, "out": "float32"}
    kernel = b.Kernel.of(spec.symbol(), [(name, dtypes.get(name, "int32")) for name in buffers(spec)], target)
    with (
        kernel as k,
        share_tiles(k, pool, b.ceil_div(pool.rank, b.WIDTH)) as (tile, panel),
        b.when(panel * b.WIDTH < tile.rank(T.int32(0))),
    ):
        first = b.let(tile.first + pool.a[0] + panel * pool.panel)
        scale = b.kept(tile.scale(T.int32(0)))
        with T.serial(tile.count) as i:
            row = tile.row(i)
            # As in `embedding`, an invalid id takes some column of the matrix.
            token = b.let(T.max(T.min(k["ids"][row], pool.columns - 1), 0))
            at = b.let(first + T.truncdiv(token, pool.lanes) * b.WIDTH)
            raw = b.kept(k["pool"][T.ramp(at, 1, b.WIDTH)], pool.word)
            to = b.let(row * pool.width + panel * b.WIDTH)
            for half in range(pool.lanes):
                with b.when(T.truncmod(token, pool.lanes) == half):
                    a = raw if pool.lanes == 1 else b.halves_of(pool.dtype, raw, half)
                    b.store_vector(k["out"], b.call("mul", a, scale), to)
    return kernel.function()
