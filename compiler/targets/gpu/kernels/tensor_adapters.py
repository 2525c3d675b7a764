"""adapter_shrink on tensor cores: a group multiplies 16 ranks of an adapter by the rows of a tile.

There are few products and they are long. So each of the group's four warps takes every fourth step of K, for every
number of rows, and the four sums are added in their order.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.gpu.kernels.fragments import LANES, call
from llmc.compiler.targets.gpu.kernels.groups import Shared, calling, sync
from llmc.compiler.targets.gpu.tensor_cores import ADAPTER_STEP, ITEMS, MATRIX_COLUMNS, MATRIX_ROWS, WARP, WARPS
from llmc.compiler.targets.reference.kernels.adapters import Pool, Slot, shrink_buffers
from llmc.compiler.targets.reference.kernels.frame import Array, Expr, Frame, let, row_width, when

_AHEAD = 4  # steps that a warp reads ahead of its products
_HALF = 8  # distance between the two ranks of a lane's results
_RESULTS = MATRIX_ROWS * MATRIX_COLUMNS
assert _RESULTS == ITEMS  # each item adds up one result


def tensor_adapter_shrink(spec: KernelSpec) -> tirx.PrimFunc:
    pool = Pool(spec)
    parts, of_part = len(pool.rows), pool.width // len(pool.rows)
    blocks = -(-of_part // MATRIX_ROWS)
    with Frame(spec.symbol(), shrink_buffers(pool)) as k:
        item, sums = calling(k).item, Shared(WARPS * _RESULTS)
        warp, within = let(T.truncdiv(item, WARP)), let(T.truncmod(item, WARP))
        with calling(k).share_groups(let(k.raw("tiles", T.int32(0)) * (parts * blocks))) as unit:
            at = let(T.truncdiv(unit, parts * blocks) * (2 + pool.tile_rows) + 1)
            slot, number = Slot(k, pool, let(k.raw("tiles", at))), let(T.truncmod(unit, parts * blocks))
            block = let(T.truncmod(number, blocks) * MATRIX_ROWS)
            for part in range(parts):
                rank = slot.rank(part)
                # The same for all items of the group.
                with when(T.And(T.truncdiv(number, blocks) == part, block < rank)):
                    sync()  # all items have read the sums of the unit before
                    _multiply(k, pool, at, let(slot.a(part)), rank, block, warp, within, sums)
                    sync()
                    r, of_tile = let(block + T.truncdiv(item, MATRIX_COLUMNS)), let(T.truncmod(item, MATRIX_COLUMNS))
                    with when(T.And(r < rank, of_tile < k.raw("tiles", at + 1))):
                        total = let(sums[item], "float32")
                        for other in range(1, WARPS):
                            total = let(total + sums[other * _RESULTS + item], "float32")
                        row = let(k.raw("tiles", at + 2 + of_tile))
                        k.store("out", total * slot.scale(part), row * pool.width + part * of_part + r)
    return k.function()


def _multiply(
    k: Frame, pool: Pool, tile: Expr, first: Expr, rank: Expr, block: Expr, warp: Expr, within: Expr, sums: Shared
) -> None:
    """A warp's steps, into `sums` by warp, rank and row. tile: its record. first: where A begins. within: the warp."""
    of_row, lane = let(T.truncdiv(within, LANES)), let(T.truncmod(within, LANES))
    steps, of_lane = pool.columns // ADAPTER_STEP, ADAPTER_STEP // LANES
    # A tile that is not full repeats its last row.
    x_row = let(k.raw("tiles", tile + 2 + of_row) * row_width(pool.columns, pool.dtype) + lane * of_lane)
    a_rows = [
        let(first + T.min(block + half * _HALF + of_row, rank - 1) * pool.stride + lane * of_lane) for half in range(2)
    ]
    chain = Array(4)
    for i in range(4):
        chain[i] = T.float32(0.0)

    def loaded(buffer: str, row: Expr, step: Expr) -> Array:
        words = Array(4, "uint32")
        call("llmc_load16", words.address(0), k.address(buffer, let(row + step * ADAPTER_STEP)))
        return words

    with T.serial(-(-steps // (WARPS * _AHEAD))) as some:
        wanted = [let((some * _AHEAD + i) * WARPS + warp) for i in range(_AHEAD)]
        known = [let(T.min(step, steps - 1)) for step in wanted]
        read = [[loaded("pool", row, step) for row in a_rows] + [loaded("x", x_row, step)] for step in known]
        for step, (low, high, x) in zip(wanted, read, strict=True):
            with when(step < steps):
                for half in (0, 2):
                    a = (low[half], high[half], low[half + 1], high[half + 1])
                    call(f"llmc_mma_{pool.dtype}", chain.address(0), *a, x[half], x[half + 1])
    for half in range(2):
        for odd in range(2):
            at = let(warp * _RESULTS + (half * _HALF + of_row) * MATRIX_COLUMNS + lane * 2 + odd)
            sums[at] = chain[2 * half + odd]
