"""linear_quant: y = x · wᵀ (+ bias) (+ residual) with w in 8 or 4 bits, a scale for each group of a column's numbers.

Each group is one chain, exact integers for int8 activations and fma for float ones, k ascending; groups are merged by
one chain of fma, ascending: y = (Σ scale · Σ (number − zero) · x) · (scale of the row) + bias + residual.
The weight is read as `quant_weight` says. A gated layer is as `linear`'s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels import quant_amx, quant_ir, vector_ir
from llmc.compiler.targets.cpu.kernels.chunks import Chunks
from llmc.compiler.targets.cpu.kernels.quant_layer import STEP_LINES, TURN, QuantLayer
from llmc.compiler.targets.cpu.kernels.quant_place import Fetch, Tile, Walk
from llmc.compiler.targets.cpu.kernels.quant_streams import StreamedBlocks, fetch_steps
from llmc.compiler.targets.cpu.kernels.quant_tile import TileWriter
from llmc.compiler.targets.cpu.kernels.quant_weight import LINE
from llmc.compiler.targets.cpu.kernels.quant_widened import ROWS as widened_rows
from llmc.compiler.targets.cpu.kernels.quant_widened import WidenedChunks
from llmc.compiler.targets.cpu.kernels.schedule import Schedule
from llmc.compiler.targets.cpu.kernels.sums import GatedOutput, Sums
from llmc.compiler.targets.cpu.kernels.tile_registers import ROWS
from llmc.compiler.targets.cpu.target import Target

_REGISTERS = {16: 32, 8: 8}  # how many vectors they hold, by lanes of a register
_STREAMS, _STREAMS_TO_FLOAT = 6, 4  # a core reads memory faster from several places at once; bytes to float: registers
_AHEAD_BYTES = 3072  # between a line of a stream and what is fetched with it
_ROWS_OF_STREAMS = 2  # more rows read too few panels side by side to fetch all they need from these
_FEW_TILES = 4  # row tiles that do not pay for unpacking a block of nibbles
# Of activations that stay in L2 while panels pass; of AMX's there is a copy on the stack.
_ROW_CHUNK_BYTES, _ROW_CHUNK_BYTES_COPIED = 768 << 10, 512 << 10
_ROW_CHUNK = 1024  # rows at most: their sums are on the stack
_PACKED_BYTES = 128 << 10  # of a panel's block in L2
_UNPACKED_BYTES = 24 << 10  # of a panel's block, unpacked, in L1


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    p = spec.as_dict()
    optional = (("asymmetric", "zero"), ("steps", "step"), ("bias", "bias"), ("residual", "residual"))
    return ("x", "w", "scale", *(name for flag, name in optional if p[flag]), "y")


def build(spec: KernelSpec, target: Target, schedule: Schedule | None = None) -> tirx.PrimFunc:
    return _LinearQuant(spec, target, schedule or default_schedule(spec, target)).function()


def default_schedule(spec: KernelSpec, target: Target) -> Schedule:
    """What suits most machines of a target. block_bytes: of what many row tiles read, packed or unpacked."""
    layer = QuantLayer(spec, target)
    streams = _STREAMS_TO_FLOAT if layer.bits == 8 and not layer.integer else _STREAMS
    block = _PACKED_BYTES if layer.exact or (layer.bits == 8 and layer.integer) else _UNPACKED_BYTES
    amx = quant_amx.takes(layer, target)
    fit = (_ROW_CHUNK_BYTES_COPIED if amx else _ROW_CHUNK_BYTES) // (layer.x_words * 4)
    rows = widened_rows if layer.lanes == 2 else min(_ROW_CHUNK, fit)
    return Schedule(streams, _AHEAD_BYTES, block, max(1 if amx else (_FEW_TILES + 1) * layer.tile, rows))


class _LinearQuant:
    def __init__(self, spec: KernelSpec, target: Target, schedule: Schedule) -> None:
        self.layer = layer = QuantLayer(spec, target)
        self.schedule = schedule
        self.spec, self.target, self.weight = spec, target, layer.weight()
        self.gate = GatedOutput(layer.gated, layer.width, layer.tile, layer.columns) if layer.gated else None
        self.amx = quant_amx.takes(layer, target)
        self.chunk_tiles = self._chunk_tiles()
        self.side_by_side = self._side_by_side()
        packed, unpacked = self._walk(unpacked=False), self._walk(unpacked=True)
        self.few_tiles = unpacked if layer.steps or (layer.bits == 8 and not layer.integer) else packed
        self.many_tiles = packed if layer.bits == 8 and layer.integer else unpacked
        # The widest tile is for many rows; of others there is one.
        self.chunked = layer.tile == target.row_tile
        self.widens = layer.lanes == 2 and self.chunked
        if self.amx:
            self.few_tiles = self.many_tiles
        self.blocks: quant_amx.Blocks | None = None

    def _chunk_tiles(self) -> int:
        """Row tiles of a chunk: as many as stay in cache, and at least some."""
        layer = self.layer
        fit = self.schedule.chunk_rows // layer.tile
        if not self.amx:
            return max(_FEW_TILES + 1, fit)
        turn = ROWS // layer.tile
        return max(turn // 2, fit // turn * turn)

    @property
    def chunk_unit(self) -> int:
        """Row tiles that are computed at a time."""
        return min(ROWS // self.layer.tile, self.chunk_tiles) if self.amx else 1

    def _side_by_side(self) -> int:
        """How many panels one row tile reads at once: as streams are fast, and as the registers hold sums."""
        layer, registers = self.layer, _REGISTERS[self.target.lanes]
        if layer.tile == 1:
            streams = min(self.schedule.streams, registers * 3 // 4 // layer.vectors)
        else:
            weights = 1 if layer.integer and layer.bits == 8 else 2  # as they lie in memory, and as numbers
            streams = (registers - 2) // (layer.tile + weights) // layer.vectors
        return max(1, min(streams, layer.panels))

    def _walk(self, *, unpacked: bool) -> Walk:
        """Blocks of whole groups, nearly equal."""
        layer = self.layer
        line_bytes = layer.columns * (LINE if layer.integer else 4 * LINE) if unpacked else self.weight.line_bytes
        unit = STEP_LINES if self.amx else 1
        if layer.number_groups > 1:
            unit = math.lcm(unit, layer.number_group_lines)
        units = b.ceil_div(layer.lines, unit)
        most = max(1, self._block_bytes(unpacked) // (line_bytes * unit))
        lines = b.ceil_div(units, b.ceil_div(units, most)) * unit
        return Walk(lines, b.ceil_div(layer.lines, lines), unpacked)

    def _block_bytes(self, unpacked: bool) -> int:
        # What the few tiles of int4 read is no part of a schedule.
        return _PACKED_BYTES if self.layer.bits == 4 and not unpacked else self.schedule.block_bytes

    def function(self) -> tirx.PrimFunc:
        layer = self.layer
        x = "int32" if layer.integer else b.word_dtype(layer.act)
        kinds = {"x": x, "w": "int32", "zero": "uint8", "step": "uint8"} | (
            {"y": self.gate.dtype()} if self.gate else {}
        )
        specs = [(name, kinds.get(name, "float32")) for name in buffers(self.spec)]
        puts = self.gate.puts() if self.gate else ()
        helpers = vector_ir.helpers(self.target.mcpu, puts=puts) + quant_ir.matmul_helpers(self.target)
        helpers += quant_amx.helpers(layer) if self.amx else ""
        kernel = b.Kernel(self.spec.symbol(), specs, helpers)
        with kernel as k:
            self.k, self.y = k, k["y"]
            self.num_rows = k.scalar(int(self.spec.as_dict()["rows"]))
            self.weight.bind(k["w"], k["step"] if layer.steps else k["zero"] if layer.asymmetric else None)
            wide = None
            if self.chunked and self.many_tiles.unpacked:
                words = self.many_tiles.lines * layer.columns * (2 if layer.integer else LINE)
                wide = b.Scratch(words, "int32" if layer.integer else "float32")
            sums = self._sums()
            self.tiles = TileWriter(layer, self.weight, k, self.num_rows, sums, wide)
            if self.amx:
                assert sums is not None
                self.blocks = quant_amx.Blocks(
                    layer, self.weight, self.tiles, sums, self.many_tiles, self.chunk_tiles,
                    whole_chunk=self.sums_of_chunk,
                )  # fmt: skip
            self._all_rows()
        return kernel.function()

    def _sums(self) -> Sums | None:
        """What holds the sums of panels side by side until their gate is written, and of all tiles between blocks."""
        layer = self.layer
        if not self.sums_of_chunk:
            return Sums(1, ROWS // layer.tile, layer.tile, layer.columns) if self.amx else None
        places = max(layer.parts, 2 * self.side_by_side if self.gate else 0)
        return Sums(places, self.chunk_tiles if self.chunked else 1, layer.tile, layer.columns)

    @property
    def sums_of_chunk(self) -> bool:
        """Whether sums of all rows of a chunk wait for something."""
        blocks = max(self.few_tiles.count, self.many_tiles.count) > 1
        merged = not self.amx and TileWriter.merges_in_memory(self.layer, self.many_tiles)
        return self.gate is not None or (self.chunked and (blocks or merged))

    # ---- loops ------------------------------------------------------------------------------------------------------

    def _all_rows(self) -> None:
        layer = self.layer
        tiles = b.let(T.truncdiv(self.num_rows + (layer.tile - 1), layer.tile))
        few = self.streamed if layer.exact and layer.tile > _ROWS_OF_STREAMS else self.tile_by_tile
        if not self.chunked:
            few(tiles)
            return
        with b.when(tiles == 1):
            few(tiles)
        if self.few_tiles == self.many_tiles:
            with b.when(tiles > 1):
                self.many(tiles)
        else:
            with b.when(T.And(tiles > 1, tiles <= _FEW_TILES)):
                self.chunks(tiles, self.few_tiles)
            with b.when(tiles > _FEW_TILES):
                self.many(tiles)

    def many(self, tiles: b.Expr) -> None:
        """More row tiles than read packed weights."""
        if not self.widens:
            self.chunks(tiles, self.many_tiles)
            return
        walk = self.many_tiles
        turn_lines = self.layer.group_lines if self.layer.groups > 1 else TURN

        def fetch_of(start: b.Expr, here: b.Expr) -> Fetch:
            return self.fetch_share(start, walk, here, turn_lines)

        WidenedChunks(
            self.layer, self.weight, self.k, self.num_rows, self.gate, walk, self.tiles.wide, self.chunk_tiles, fetch_of
        ).run(tiles)

    def streamed(self, tiles: b.Expr) -> None:
        """One row tile, whose panels' sums wait in L1: as many streams of weights as of fewer rows."""
        StreamedBlocks(self.layer, self.weight, self.k, self.num_rows, self.gate, self.schedule.streams).run(tiles)

    def tile_by_tile(self, tiles: b.Expr) -> None:
        """Panels side by side, as many streams of weights; in groups of nearly equal size, as few streams are slow."""
        layer, most = self.layer, self.side_by_side
        panel0, panel1 = self.k.share_bounds(layer.panels)
        count = b.let(panel1 - panel0)
        groups = b.let(T.truncdiv(count + (most - 1), most))
        whole = Walk(layer.lines, 1, unpacked=False)
        with T.serial(tiles) as t, T.serial(groups) as group:
            first = b.let(panel0 + T.truncdiv(group * count, groups))
            size = b.let(panel0 + T.truncdiv((group + 1) * count, groups) - first)
            with T.serial(layer.parts) as part:
                for some in range(1, most + 1):
                    with b.when(size == some):
                        units = [b.let(first + i) for i in range(some)]
                        places = [part * most + i for i in range(some)]
                        fetch = self.fetch_streams([b.let(layer.panel(part, unit)) for unit in units])
                        self.tiles.row_tile(t, 0, units, part, places, whole, T.int32(0), fetch)
            if self.gate:
                with T.serial(size) as i:
                    self.write_gated(b.let(first + i), (i, most + i), t, T.int32(0))

    def chunks(self, tiles: b.Expr, walk: Walk) -> None:
        """Chunks of row tiles × panels × blocks of K × row tiles: a block of a panel stays in cache for all tiles, who
        fetch the next one meanwhile, each its share."""
        layer = self.layer
        chunks = Chunks(self.k, tiles, layer.panels, self.chunk_tiles, self.chunk_unit)
        unit0, unit1 = chunks.bounds()
        last = b.let(unit1 * (layer.parts * walk.count) - 1)
        if self.blocks:
            b.do("tile_configure")
        with T.serial(unit0, unit1) as unit:
            chunk, panel = b.let(T.truncdiv(unit, layer.panels)), b.let(T.truncmod(unit, layer.panels))
            tile0, here = chunks.span(chunk)
            if self.blocks:
                with b.when(T.Or(unit == unit0, panel == 0)):
                    self.blocks.registers.copy_rows(tile0, here)
            with T.serial(layer.parts) as part, T.serial(walk.count) as kb:
                if walk.unpacked:
                    line0 = b.let(kb * walk.lines)
                    length = b.let(T.min(layer.lines - line0, walk.lines))
                    self.weight.unpack(self.tiles.wide, b.let(layer.panel(part, panel)), line0, length)
                following = b.let(T.min((unit * layer.parts + part) * walk.count + kb + 1, last))
                start = self.block_start(following, walk)
                if self.blocks:
                    fetch = self.fetch_share(start, walk, b.let(self.blocks.turns(here)), STEP_LINES)
                    self.blocks.block(tile0, here, panel, part, kb, fetch)
                else:
                    turn_lines = layer.group_lines if layer.groups > 1 else TURN
                    fetch = self.fetch_share(start, walk, here, turn_lines)
                    with T.serial(here) as t:
                        self.tiles.row_tile(tile0 + t, t, [panel], part, [part], walk, kb, fetch)
            if self.gate:
                with T.serial(here) as t:
                    self.write_gated(panel, (0, 1), b.let(tile0 + t), b.let(t))
        if self.blocks:
            b.do("tile_release")

    def write_gated(self, panel: b.Expr, places: tuple[b.Expr, b.Expr], t: b.Expr, t_local: b.Expr) -> None:
        assert self.gate is not None
        self.gate.write(self.y, self.tiles.sums, places, panel, b.let(t), t_local, self.num_rows)

    # ---- what comes next --------------------------------------------------------------------------------------------

    def fetch_streams(self, panels: Sequence[b.Expr]) -> Fetch:
        """Few rows fetch what comes a while after a line of each panel. More rows read fewer panels, and fetch as much
        of the panels behind them, at as many places as a line has vectors: few streams are slow."""
        layer, weight = self.layer, self.weight

        def fetch(line: b.Expr, v: int) -> None:
            panel, of_panel = panels[v // layer.vectors], v % layer.vectors
            for i in range(weight.line_words):
                if layer.tile <= _ROWS_OF_STREAMS:
                    at = weight.position(panel, line) + (
                        i * layer.columns + of_panel * b.WIDTH + self.schedule.ahead_bytes // 4
                    )
                else:
                    place = (of_panel * weight.line_words + i) * layer.lines
                    at = weight.position(panel + len(panels), 0) + (line + place) * b.WIDTH
                weight.fetch(at)

        return Fetch(fetch, fetch_steps(weight, panels, len(panels)) if layer.steps else None)

    def fetch_share(self, ahead: b.Expr, walk: Walk, tiles: b.Expr, turn_lines: int) -> Fetch:
        """Each of `tiles` tiles fetches its share of the block at `ahead`, at several places of it, and what it is
        going to write. turn_lines: lines of a turn."""
        turns = b.ceil_div(walk.lines, turn_lines)
        share = b.let(T.truncdiv(walk.lines + (tiles - 1), tiles))
        of_turn = b.let(T.truncdiv(share + (turns - 1), turns))

        def fetch(tile: Tile, turn: b.Expr) -> None:
            if tile.rows.start == 0:
                with b.when(turn * of_turn < share), T.serial(of_turn) as i:
                    at = b.let(ahead + (tile.t_local * share + turn * of_turn + i) * b.WIDTH)
                    for place in range(self.weight.line_vectors):
                        self.weight.fetch(at + place * (walk.lines * b.WIDTH), level=2)
            if not self.gate:
                self.fetch_output(tile, turn, turns)

        return Fetch(at_turn=fetch)

    def fetch_output(self, tile: Tile, turn: b.Expr, turns: int) -> None:
        """A share of the rows of y that a tile will write, and of what it will add to them. turns: of a block."""
        layer = self.layer
        share = b.ceil_div(len(tile.rows), turns)
        with b.when(T.And(tile.kb == tile.walk.count - 1, turn * share < len(tile.rows))):
            for i in range(share):
                row = tile.t * layer.tile + (tile.rows.start + i) + turn * share
                at = b.let(row * layer.width + tile.units[0] * layer.columns)
                for v in range(layer.vectors):
                    b.do("prefetch_write", b.at(self.y, at + v * b.WIDTH))
                    if layer.residual:
                        b.do("prefetch", b.at(self.k["residual"], at + v * b.WIDTH))

    def block_start(self, number: b.Expr, walk: Walk) -> b.Expr:
        """Where a block starts in the weight. number: of blocks before it, in the order in which they are walked."""
        layer = self.layer
        unit_part = b.let(T.truncdiv(number, walk.count))
        kb = b.let(number - unit_part * walk.count)
        unit = b.let(T.truncdiv(unit_part, layer.parts))
        panel = b.let(layer.panel(unit_part - unit * layer.parts, T.truncmod(unit, layer.panels)))
        return b.let(self.weight.position(panel, kb * walk.lines))
