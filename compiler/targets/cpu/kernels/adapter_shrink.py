"""adapter_shrink: scale · x Aᵀ of the rows of each tile, 16 ranks a vector.

Each element is one chain of float32 multiply-adds over ascending columns, independent of other rows. A task reads
several panels of A side by side, of one tile or of several: a chain waits for its last sum, and memory for few streams.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.adapter_slots import AHEAD, Pool, Tile, chosen
from llmc.compiler.targets.cpu.kernels.expert_index import ExpertIndex
from llmc.compiler.targets.cpu.target import Target

_STREAMS = 4  # panels read side by side
_CHAINS = {16: 8, 8: 4}
"""Most chains of sums at once, by lanes of a register: they and the vectors of A stay in registers."""


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    return ("x", *(("index",) if "experts" in spec.as_dict() else ()), "tiles", "pool", "out")


class _Stream:
    """A panel of A for the rows of a tile. unit: counted over all panels of the first tile, then of the next."""

    def __init__(self, k: b.Kernel, pool: Pool, panels: int, unit: b.Expr) -> None:
        self._pool, pieces = pool, pool.num_layers * panels
        self.piece = b.let(T.truncmod(unit, pieces))
        self.tile = Tile(k, pool, b.let(T.truncdiv(unit, pieces)))
        self.layer, self.panel = b.let(T.truncdiv(self.piece, panels)), b.let(T.truncmod(self.piece, panels))
        self.part = T.int32(0) if pool.heads else self.layer

    def first(self) -> b.Expr:
        """Where the panel begins in the pool."""
        pool = self._pool
        of_part = chosen(self.part, list(range(len(pool.a))), pool.a)
        copy = self.layer if pool.heads else self.tile.expert
        return b.let(self.tile.first + of_part + self.panel * pool.panel + copy * pool.a_of_copy)

    def used(self) -> b.Expr:
        """Whether the adapter has ranks in the panel."""
        return self.panel * b.WIDTH < self.tile.rank(self.part)


class _Sums:
    """Emits the sums of streams side by side."""

    def __init__(self, k: b.Kernel, pool: Pool, row_tile: int, stride: int) -> None:
        """stride: floats between heads of a row of x."""
        self._k, self._pool, self._row_tile, self._stride = k, pool, row_tile, stride
        self._words = b.ceil_div(pool.columns, pool.lanes)

    def emit(self, streams: Sequence[_Stream], count: int) -> None:
        """Computes `count` rows of each stream."""
        k, pool, words = self._k, self._pool, self._words
        numbers = [[one.tile.row(i) for i in range(count)] for one in streams]
        lying = [self._rows(one, rows) for one, rows in zip(streams, numbers, strict=True)]
        first = [one.first() for one in streams]
        total = b.Vectors(len(streams) * count)
        for place in range(len(streams) * count):
            total[place] = b.splat(0.0)
        with T.serial(words) as w:
            for s in range(len(streams)):
                at = b.let(first[s] + w * b.WIDTH)
                b.do("prefetch", b.at(k["pool"], at + AHEAD))
                raw = b.kept(k["pool"][T.ramp(at, 1, b.WIDTH)], pool.word)
                source, step = lying[s]
                words_of_x = [] if pool.heads else [k["x"][source[i] + w * step] for i in range(count)]
                for half in range(pool.lanes):
                    a = b.kept(raw if pool.lanes == 1 else b.halves_of(pool.dtype, raw, half))
                    for i in range(count):
                        if pool.heads:
                            of_row = b.splat(k["x"][source[i] + (w * pool.lanes + half)])
                        elif pool.lanes == 1:
                            of_row = b.splat(words_of_x[i])
                        else:
                            of_row = b.half_in_all(pool.dtype, words_of_x[i], half)
                        total[s * count + i] = b.call("fma", of_row, a, total[s * count + i])
        for s, one in enumerate(streams):
            scale = b.kept(one.tile.scale(one.part))
            for i in range(count):
                at = b.let(numbers[s][i] * pool.width + one.piece * b.WIDTH)
                b.store_vector(k["out"], b.call("mul", total[s * count + i], scale), at)

    def _rows(self, stream: _Stream, rows: Sequence[b.Expr]) -> tuple[list[b.Expr], b.Expr]:
        """Places of the first words of rows of x, and the distance between words. An expert's rows have a row tile of
        their own. Rows of heads are plain floats."""
        tile = stream.tile
        if heads := self._pool.heads:
            return [b.let((row * heads + stream.layer) * self._stride) for row in rows], 1
        if not self._pool.experts:
            return [b.let(b.packed_position(row, self._row_tile, self._words)) for row in rows], self._row_tile
        index = ExpertIndex(self._k["index"], self._pool.experts)
        number = b.let(index[index.number_at(tile.expert)])
        first, size = b.let(index[index.first_at(number)]), b.let(index[index.tile_at(number)])
        of_tile = [b.let(T.truncmod(row - first, size)) for row in rows]
        return [b.let((row - of) * self._words + of) for row, of in zip(rows, of_tile, strict=True)], size


def build(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    p, pool = spec.as_dict(), Pool(spec)
    panels, chains = b.ceil_div(pool.rank, b.WIDTH), _CHAINS[target.lanes]
    dtypes = {"x": "float32" if pool.heads else pool.word, "pool": pool.word, "out": "float32"}
    kernel = b.Kernel.of(spec.symbol(), [(name, dtypes.get(name, "int32")) for name in buffers(spec)], target)
    with kernel as k:
        sums = _Sums(k, pool, int(p.get("row_tile", 1)), int(p.get("stride", 0)))
        held = T.alloc_buffer((_STREAMS,), "int32", scope="local")
        state = T.alloc_buffer((2,), "int32", scope="local")  # streams held, and the most rows of one

        def run() -> None:
            """All streams held."""
            for count in pool.counts():
                with b.when(pool.fits(state[1], count)):
                    beside = max(1, min(_STREAMS, chains // count))
                    with T.serial(b.let(T.truncdiv(state[0] + (beside - 1), beside))) as group:
                        # Past the last stream, the last one again.
                        units = [held[T.min(group * beside + i, state[0] - 1)] for i in range(beside)]
                        sums.emit([_Stream(k, pool, panels, b.let(unit)) for unit in units], count)
            b.store(state, T.int32(0), 0)
            b.store(state, T.int32(0), 1)

        b.store(state, T.int32(0), 0)
        b.store(state, T.int32(0), 1)
        first, end = k.share_bounds(b.let(k["tiles"][0] * (pool.num_layers * panels)))
        with T.serial(first, end) as unit:
            stream = _Stream(k, pool, panels, b.let(unit))
            with b.when(stream.used()):
                b.store(held, unit, state[0])
                b.store(state, state[0] + 1, 0)
                b.store(state, T.max(state[1], stream.tile.count), 1)
            full = T.Or(state[0] == _STREAMS, T.And(unit == end - 1, state[0] > 0))
            with b.when(full):
                run()
    return kernel.function()
