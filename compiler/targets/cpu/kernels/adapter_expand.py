"""adapter_expand: multiplies the output of adapter_shrink by Bᵀ and adds it to each tile's rows, 16 columns a vector.

Each element is one chain of float32 multiply-adds over ascending ranks, then one sum, independent of other rows.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.adapter_slots import AHEAD, Pool, Tile, chosen, share_tiles
from llmc.compiler.targets.cpu.target import Target

_BLOCK = 8  # vectors of columns per unit of work


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    return ("x", "tiles", "pool", "out")


class _Piece:
    """A run of columns of a layer.

    part: the part they belong to. begin, columns: its first column and its width. b: offset of its B in a slot. first:
    the run's first vector of columns. layer: the number of the part or head. before: of an expert's or a head's B, the
    vectors of columns before it.
    """

    def __init__(self, pool: Pool, blocks: list[int], number: b.Expr, expert: b.Expr) -> None:
        if pool.heads:
            self.layer = b.let(T.truncdiv(number, blocks[0]))
            self.part, self.columns, self.b = T.int32(0), T.int32(pool.rows[0]), T.int32(pool.b[0])
            self.begin, self.before = b.let(self.layer * pool.rows[0]), b.let(self.layer * pool.b_of_copy[0])
            self.first = b.let(T.truncmod(number, blocks[0]) * _BLOCK)
            return
        parts = range(len(blocks))
        starts = [sum(blocks[:part]) for part in parts]
        self.layer = self.part = chosen(number, starts, list(parts))
        self.begin = chosen(number, starts, [sum(pool.rows[:part]) for part in parts])
        self.columns = chosen(number, starts, pool.rows)
        self.b = chosen(number, starts, pool.b)
        self.before = b.let(expert * chosen(number, starts, pool.b_of_copy))
        self.first = b.let((number - chosen(number, starts, starts)) * _BLOCK)


def build(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    pool = Pool(spec)
    lanes, n, of_layer = pool.lanes, max(1, pool.heads) * sum(pool.rows), pool.width // pool.num_layers
    whole = all(rows % b.WIDTH == 0 for rows in pool.rows)
    blocks = [b.ceil_div(rows, _BLOCK * b.WIDTH) for rows in pool.rows]
    kernel = b.Kernel.of(spec.symbol(), pool.buffers("float32"), target)
    with kernel as k, share_tiles(k, pool, max(1, pool.heads) * sum(blocks)) as (tile, number):
        piece = _Piece(pool, blocks, number, tile.expert)
        rank = tile.rank(piece.part)
        words = b.let(T.truncdiv(rank + (lanes - 1), lanes))
        vectors = b.let(T.truncdiv(piece.columns + (b.WIDTH - 1), b.WIDTH))

        def rows(tile: Tile, count: int) -> None:
            number = [tile.row(i) for i in range(count)]
            source = [b.let(row * pool.width + piece.layer * of_layer) for row in number]
            to = [b.let(row * n + piece.begin) for row in number]
            total = b.Vectors(count)
            with T.serial(piece.first, b.let(T.min(piece.first + _BLOCK, vectors))) as vector:
                of_b = b.let((piece.before + vector) * words)
                first = b.let(tile.first + piece.b + of_b * b.WIDTH)
                for i in range(count):
                    total[i] = b.splat(0.0)
                with T.serial(words) as w:
                    line = b.let(first + w * b.WIDTH)
                    b.do("prefetch", b.at(k["pool"], line + AHEAD))
                    raw = b.kept(k["pool"][T.ramp(line, 1, b.WIDTH)], pool.word)
                    for half in range(lanes):
                        values = b.kept(raw if lanes == 1 else b.halves_of(pool.dtype, raw, half))
                        for i in range(count):
                            shrunk = b.splat(k["x"][source[i] + w * lanes + half])
                            total[i] = b.call("fma", shrunk, values, total[i])
                column = b.let(vector * b.WIDTH)
                some = b.WIDTH if whole else b.let(T.min(piece.columns - column, b.WIDTH))
                for i in range(count):
                    # A row that repeats the last one to fill the tile has its sum already.
                    with b.when(tile.count > i):
                        at = b.let(to[i] + column)
                        found = b.call("add", b.load_vector(k["out"], at, some), total[i])
                        b.store_vector(k["out"], found, at, some)

        with b.when(rank > 0):
            tile.by_count(lambda count: rows(tile, count))
    return kernel.function()
