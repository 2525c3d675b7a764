"""Many rows of `linear_quant` whose activations are bf16, which is multiplied as float32: rows become float32 once for
a group of panels, not for each."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.chunks import Chunks
from llmc.compiler.targets.cpu.kernels.quant_layer import QuantLayer
from llmc.compiler.targets.cpu.kernels.quant_place import Fetch, Walk
from llmc.compiler.targets.cpu.kernels.quant_tile import TileWriter
from llmc.compiler.targets.cpu.kernels.quant_weight import LINE, QuantWeight
from llmc.compiler.targets.cpu.kernels.sums import GatedOutput, Sums
from llmc.compiler.targets.cpu.kernels.widening import widen_words

ROWS = 256
"""Rows of a chunk: a block of K of theirs and the sums of a group of panels stay in L2."""
_PANELS = 8  # of a group


class WidenedChunks:
    """Emits the loops of a kernel `k`. walk: of blocks that are unpacked to `wide`; fetch_of: fetches a block of the
    weight that starts at a position, in shares of so many row tiles."""

    def __init__(
        self, layer: QuantLayer, weight: QuantWeight, k: b.Kernel, num_rows: b.Expr, gate: GatedOutput | None,
        walk: Walk, wide: b.Scratch, chunk_tiles: int, fetch_of: Callable[[b.Expr, b.Expr], Fetch],
    ) -> None:  # fmt: skip
        self.layer, self.weight, self.k, self.num_rows, self.gate = layer, weight, k, num_rows, gate
        self.walk, self.wide, self.chunk_tiles, self.fetch_of = walk, wide, chunk_tiles, fetch_of
        self.most = _PANELS // layer.parts
        self.block = walk.lines * LINE  # elements
        self.wide_x = T.alloc_buffer((self.chunk_tiles * self.block * layer.tile,), "float32", scope="local")
        self.sums = Sums(self.most * layer.parts, self.chunk_tiles, layer.tile, layer.columns)
        self.tiles = TileWriter(layer, weight, k, num_rows, self.sums, wide, self.wide_x)

    def run(self, tiles: b.Expr) -> None:
        """Chunks of row tiles × groups of panels × blocks of K × panels × row tiles."""
        layer = self.layer
        chunks = Chunks(self.k, tiles, layer.panels, self.chunk_tiles)
        unit0, unit1 = chunks.bounds()
        first_chunk, end = T.truncdiv(unit0, layer.panels), T.truncdiv(unit1 + (layer.panels - 1), layer.panels)
        with T.serial(b.let(first_chunk), b.let(end)) as chunk:
            panel0 = b.let(T.max(unit0 - chunk * layer.panels, 0))
            panel1 = b.let(T.min(unit1 - chunk * layer.panels, layer.panels))
            tile0, here = chunks.span(b.let(chunk))
            with T.serial(T.truncdiv(panel1 - panel0 + (self.most - 1), self.most)) as group:
                first = b.let(panel0 + group * self.most)
                count = b.let(T.min(self.most, panel1 - first))
                with T.serial(self.walk.count) as kb:
                    self.blocks(tile0, here, first, count, b.let(kb))
                if self.gate:
                    with T.serial(count) as i, T.serial(here) as t:
                        places, unit = (i, self.most + i), b.let(first + i)
                        self.gate.write(self.k["y"], self.sums, places, unit, b.let(tile0 + t), t, self.num_rows)

    def blocks(self, tile0: b.Expr, here: b.Expr, first: b.Expr, count: b.Expr, kb: b.Expr) -> None:
        """Block kb of K: row tiles [tile0, tile0 + here) times panels [first, first + count) of all parts."""
        layer, walk = self.layer, self.walk
        line0 = b.let(kb * walk.lines)
        length = b.let(T.min(layer.lines - line0, walk.lines))
        with T.serial(here) as t:
            self.widen_rows(b.let(tile0 + t), b.let(t), kb)
        with T.serial(layer.parts) as part, T.serial(count) as i:
            panel = b.let(layer.panel(part, first + i))
            self.weight.unpack(self.wide, panel, line0, length)
            past = b.let(T.Cast("int32", i + 1 == count))  # the group's last panel of the part: K goes on at its first
            following = b.let(T.min(kb + past, walk.count - 1))
            ahead = self.weight.position(layer.panel(part, first + (i + 1) * (1 - past)), following * walk.lines)
            fetch, place = self.fetch_of(b.let(ahead), here), b.let(part * self.most + i)
            with T.serial(here) as t:
                self.tiles.row_tile(tile0 + t, t, [first + i], part, [place], walk, kb, fetch)

    def widen_rows(self, t: b.Expr, t_local: b.Expr, kb: b.Expr) -> None:
        """Block kb of row tile t, [words][rows] of two elements: first all low halves, then all high ones."""
        tile, words, x_words = self.layer.tile, self.block // 2, self.layer.x_words
        source = b.let((t * x_words + kb * words) * tile)
        low = b.let(t_local * self.block * tile)
        count = b.let(T.min(x_words - kb * words, words) * tile)
        widen_words(self.k["x"], source, count, self.wide_x, low, b.let(low + words * tile))
