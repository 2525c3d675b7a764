"""linear_quant: y = x · wᵀ (+ bias) (+ residual) with w in 8 or 4 bits, a scale for each group of a column's numbers.

Each group is one chain, exact integers for int8 activations and fma for float ones, k ascending; groups are merged by
one chain of fma, ascending: y = (Σ scale · Σ (number − zero) · x) · (scale of the row) + bias + residual.
The weight is read as `quant_weight` says. A gated layer is as `linear`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernels import builder as b
from llmc.compiler.kernels import quant_ir, vector_ir
from llmc.compiler.kernels.quant_weight import LINE, QuantWeight
from llmc.compiler.kernels.spec import KernelSpec
from llmc.compiler.kernels.sums import GATED, GatedOutput, Sums
from llmc.compiler.targets.cpu import Target

_MAX_K = 1 << 17  # 127 · 128 · K stays below 2³¹
_SUMS = {16: 24, 8: 6}  # vectors of sums that fit the registers beside their operands, by lanes of a register
_STREAMS, _STREAMS_TO_FLOAT = 6, 4  # a core reads memory faster from several places at once; bytes to float: registers
_TURN = 4  # lines of one turn of a group's loop; groups are a multiple
_ROWS_OF_GROUPS = 4  # rows whose sums of a group and of all groups fit the registers
_FEW_TILES = 4  # row tiles that do not pay for unpacking a block
_ROW_CHUNK_BYTES = 512 << 10  # of activations that stay in L2 while panels pass
_ROW_CHUNK = 1024  # rows at most: their sums are on the stack
_BLOCK_BYTES = 24 << 10  # of a panel's block, unpacked, in L1


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    p = spec.as_dict()
    optional = (("asymmetric", "zero"), ("bias", "bias"), ("residual", "residual"))
    return ("x", "w", "scale", *(name for flag, name in optional if p[flag]), "y")


def build(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    return _LinearQuant(spec, target).function()


@dataclass(frozen=True)
class _Tile:
    """Rows of row tile `t` times panels: sums that stay in registers while K is walked."""

    t: b.Expr
    t_local: b.Expr  # the row tile among those whose sums are kept
    rows: range  # of the row tile
    units: list[b.Expr]  # the panels within their part of the weight
    part: b.Expr
    panels: list[b.Expr]
    places: list[b.Expr]
    x0: b.Expr  # where the row tile starts in x
    kb: b.Expr | None  # block of K of a panel that all row tiles pass; None: all of K, from packed weights
    fetch: bool


class _LinearQuant:
    def __init__(self, spec: KernelSpec, target: Target) -> None:
        p = spec.as_dict()
        self.kdim, self.n, self.tile, self.bits = int(p["k"]), int(p["n"]), int(p["row_tile"]), int(p["bits"])
        self.act, self.bias, self.residual = str(p["act_dtype"]), bool(p["bias"]), bool(p["residual"])
        self.asymmetric, group_size = bool(p["asymmetric"]), int(p["group_size"])
        if self.bits not in (4, 8) or group_size == 0 or (group_size > 0 and group_size % (_TURN * LINE)):
            raise b.KernelSpecError(f"linear_quant: {self.bits} bits in groups of {group_size} have no layout")
        if p["gated"] not in GATED or (p["gated"] and (self.residual or self.n % 2)):
            raise b.KernelSpecError(f"linear_quant: no layer of {self.n} columns is gated as {p['gated']!r}")
        self.spec, self.target, self.rows = spec, target, int(p["rows"])
        self.parts = 2 if p["gated"] else 1
        self.width = self.n // self.parts
        self.integer = self.act == "i8"
        if self.integer and self.kdim > _MAX_K:
            raise b.KernelSpecError(
                f"linear_quant: sums of {self.kdim} products of int8 may overflow; at most {_MAX_K}"
            )
        self.lanes = 4 if self.integer else b.lanes_of(self.act)
        self.columns = target.panel_columns
        self.panels, self.vectors = b.ceil_div(self.width, self.columns), self.columns // b.WIDTH
        gated, written = str(p["gated"]), "f32" if self.integer else self.act
        self.gate = GatedOutput(gated, self.width, self.tile, self.columns, written) if gated else None
        self.lines = b.ceil_div(self.kdim, LINE)
        self.groups = 1 if group_size < 0 else b.ceil_div(self.kdim, group_size)
        self.group_lines = self.lines if self.groups == 1 else group_size // LINE
        self.weight = QuantWeight(
            self.bits,
            self.columns,
            self.lines,
            self.groups,
            self.group_lines,
            integer=self.integer,
            asymmetric=self.asymmetric,
        )
        # Elements past the last whole line: float activations end there.
        self.tail = 0 if self.integer else self.kdim % LINE
        self.whole_lines = self.kdim // LINE if self.tail else self.lines
        self.x_words = 2 * self.lines if self.integer else b.ceil_div(self.kdim, self.lanes)
        self.tile_words = self.tile * (self.x_words + (1 + self.groups if self.integer else 0))
        line_bytes = self.columns * (LINE if self.integer else 4 * LINE)
        unit = self.group_lines if self.groups > 1 else 1
        units = b.ceil_div(self.lines, unit)
        self.blocks = b.ceil_div(units, max(1, _BLOCK_BYTES // (line_bytes * unit)))
        self.block = b.ceil_div(units, self.blocks) * unit
        self.blocks = b.ceil_div(self.lines, self.block)
        self.unpacks = self.bits == 4 or not self.integer
        row_bytes = self.x_words * 4
        self.chunk_tiles = max(_FEW_TILES + 1, min(_ROW_CHUNK, _ROW_CHUNK_BYTES // row_bytes) // self.tile)

    def function(self) -> tirx.PrimFunc:
        x = "int32" if self.integer else b.word_dtype(self.act)
        kinds = {"x": x, "w": "int32", "zero": "uint8"} | ({"y": self.gate.dtype()} if self.gate else {})
        specs = [(name, kinds.get(name, "float32")) for name in buffers(self.spec)]
        puts = self.gate.puts() if self.gate else ()
        helpers = vector_ir.helpers(self.target.mcpu, puts=puts) + quant_ir.matmul_helpers(self.target)
        kernel = b.Kernel(self.spec.symbol(), specs, helpers)
        with kernel as k:
            self.k, self.x, self.y = k, k["x"], k["y"]
            self.num_rows = k.scalar(self.rows)
            self.weight.bind(k["w"], k["zero"] if self.asymmetric else None)
            if self.tile == 1:
                self.few_tiles(self.num_rows)
            else:
                self.chunks()
        return kernel.function()

    # ---- loops ------------------------------------------------------------------------------------------------------

    def chunks(self) -> None:
        """Chunks of row tiles × panels; a chunk of few tiles reads packed weights, others unpack blocks of a panel."""
        tiles = b.let(T.truncdiv(self.num_rows + (self.tile - 1), self.tile))
        with T.If(tiles <= _FEW_TILES):
            with T.Then():
                self.few_tiles(tiles)
            with T.Else():
                self.many_tiles(tiles)

    def few_tiles(self, tiles: b.Expr) -> None:
        """Panels side by side, as many streams of weights; in groups of nearly equal size, as few streams are slow."""
        panel0, panel1 = self.k.share_bounds(self.panels)
        count = b.let(panel1 - panel0)
        streams = _STREAMS_TO_FLOAT if self.bits == 8 and not self.integer else _STREAMS
        most = max(1, min(streams, self.panels, _SUMS[self.target.lanes] // (self.tile * self.vectors)))
        groups = b.let(T.truncdiv(count + (most - 1), most))
        if self.gate:
            # Of one row tile at a time where there may be many: they have one row.
            self.sums = Sums(2 * most, 1 if self.tile == 1 else _FEW_TILES, self.tile, self.columns)
        outer, inner = (tiles, 1) if self.tile == 1 else (1, tiles)
        with T.serial(outer) as t0, T.serial(groups) as group:
            first = b.let(panel0 + T.truncdiv(group * count, groups))
            size = b.let(panel0 + T.truncdiv((group + 1) * count, groups) - first)
            with T.serial(self.parts) as part:
                for some in range(1, most + 1):
                    with b.when(size == some), T.serial(inner) as t:
                        places = [part * most + i for i in range(some)]
                        self.row_tile(t0 + t, t, [first + i for i in range(some)], part, places)
            if self.gate:
                with T.serial(size) as i, T.serial(inner) as t:
                    panel, tile = b.let(first + i), b.let(t0 + t)
                    self.gate.write(self.y, self.sums, (i, most + i), panel, tile, t, self.num_rows)

    def many_tiles(self, tiles: b.Expr) -> None:
        """Chunks of row tiles × panels × blocks of K × row tiles: a block of a panel stays in L1 for all tiles."""
        panels = self.panels
        if self.unpacks:
            words = self.block * self.columns * (2 if self.integer else LINE)
            self.wide = b.Scratch(words, "int32" if self.integer else "float32")
        if self.gate or self.blocks > 1:
            self.sums = Sums(self.parts, self.chunk_tiles, self.tile, self.columns)
        chunks = T.truncdiv(tiles + (self.chunk_tiles - 1), self.chunk_tiles)
        unit0, unit1 = self.k.share_bounds(chunks * panels)
        with T.serial(unit0, unit1) as unit:
            chunk, panel = b.let(T.truncdiv(unit, panels)), b.let(T.truncmod(unit, panels))
            tile0 = b.let(chunk * self.chunk_tiles)
            tile1 = b.let(T.min(tile0 + self.chunk_tiles, tiles))
            with T.serial(self.parts) as part, T.serial(self.blocks) as kb:
                line0 = b.let(kb * self.block)
                if self.unpacks:
                    length = b.let(T.min(self.lines - line0, self.block))
                    self.weight.unpack(self.wide, b.let(self.index(part, panel)), line0, length)
                with T.serial(tile0, tile1) as t:
                    self.row_tile(t, t - tile0, [panel], part, [part], kb)
            if self.gate:
                with T.serial(tile0, tile1) as t:
                    self.gate.write(self.y, self.sums, (0, 1), panel, b.let(t), b.let(t - tile0), self.num_rows)

    def index(self, part: b.Expr, unit: b.Expr) -> b.Expr:
        """Which panel of the weight is panel `unit` of a part."""
        return unit if self.parts == 1 else part * self.panels + unit

    # ---- the register tile ------------------------------------------------------------------------------------------

    def row_tile(
        self,
        t: b.Expr,
        t_local: b.Expr,
        units: Sequence[b.Expr],
        part: b.Expr,
        places: Sequence[b.Expr],
        kb: b.Expr | None = None,
    ) -> None:
        """Row tile t times panels `units` of a part of the weight: block kb of K, or all of K from packed weights.

        places: of each panel's sums between passes, t_local: the row tile's in them.
        """
        t, t_local, units = b.let(t), b.let(t_local), [b.let(unit) for unit in units]
        panels = [b.let(self.index(part, unit)) for unit in units]
        x0 = b.let(t * self.tile_words)
        step = min(self.tile, _ROWS_OF_GROUPS) if self.integer and self.groups > 1 and kb is not None else self.tile
        for first in range(0, self.tile, step):
            rows = range(first, first + step)
            tile = _Tile(t, t_local, rows, units, part, panels, list(places), x0, kb, fetch=kb is None and not first)
            if first:
                with b.when(t * self.tile + first < self.num_rows):
                    self.tile_body(tile)
            else:
                self.tile_body(tile)

    def tile_body(self, tile: _Tile) -> None:
        t, kb, vectors = tile.t, tile.kb, len(tile.panels) * self.vectors
        of_vector = [(place, v) for place in tile.places for v in range(self.vectors)]
        line0 = b.let(T.int32(0) if kb is None else kb * self.block)
        line1 = b.let(T.int32(self.lines) if kb is None else T.min(line0 + self.block, self.lines))
        acc = b.Vectors(len(tile.rows) * vectors, "int32" if self.integer else "float32")
        total = b.Vectors(len(tile.rows) * vectors) if self.groups > 1 else acc

        def each_row(body: Callable[[int, int], None]) -> None:
            for i, r in enumerate(tile.rows):
                if self.tile == 1:
                    body(i, r)
                else:
                    with b.when(t * self.tile + r < self.num_rows):
                        body(i, r)

        exact = self.integer and self.groups == 1

        def reload() -> None:
            for i, r in enumerate(tile.rows):
                for at, (place, v) in enumerate(of_vector):
                    value = self.sums.load(place, tile.t_local, r, v)
                    total[i * vectors + at] = T.reinterpret("int32x16", value) if exact else value

        def partial() -> None:
            for i, r in enumerate(tile.rows):
                for at, (place, v) in enumerate(of_vector):
                    value = total[i * vectors + at]
                    value = T.reinterpret("float32x16", value) if exact else value
                    self.sums.store(value, place, tile.t_local, r, v)

        def finish(i: int, r: int) -> None:
            self.finish_row(tile, i, r, total)

        if self.groups == 1:
            self.start(tile, acc, T.int32(0))
        else:
            for i in range(len(tile.rows) * vectors):
                total[i] = b.splat(0.0)
        if kb is not None and self.blocks > 1:
            with b.when(kb > 0):
                reload()
        if self.groups == 1:
            self.chain(tile, acc, line0, line1, T.int32(0), line0)
        else:
            group0 = b.let(T.truncdiv(line0, self.group_lines))
            group1 = b.let(T.truncdiv(line1 + (self.group_lines - 1), self.group_lines))
            with T.serial(group0, group1) as g:
                group = b.let(g)
                first = b.let(group * self.group_lines)
                last = b.let(T.min(first + self.group_lines, line1))
                self.start(tile, acc, group)
                self.chain(tile, acc, first, last, group, line0)
                self.merge(tile, total, acc, group)
        if kb is not None and self.blocks > 1:
            with T.If(kb < self.blocks - 1):
                with T.Then():
                    partial()
                with T.Else():
                    each_row(finish)
        else:
            each_row(finish)

    def sum_of(self, x0: b.Expr, r: int, group: b.Expr) -> b.Expr:
        """Σ of the quantized activations of a row in a group, times WeightFormat.sum_factor."""
        return self.x[x0 + (group + (self.x_words + 1)) * self.tile + r]

    def start(self, tile: _Tile, acc: b.Vectors, group: b.Expr) -> None:
        """The sums before the first element: what a fixed zero point takes off, or 0."""
        vectors = len(tile.panels) * self.vectors
        for i, r in enumerate(tile.rows):
            for v in range(vectors):
                if not self.integer:
                    acc[i * vectors + v] = b.splat(0.0)
                elif self.asymmetric:
                    acc[i * vectors + v] = T.broadcast(T.int32(0), b.WIDTH)
                else:
                    acc[i * vectors + v] = T.broadcast(self.sum_of(tile.x0, r, group), b.WIDTH)

    def chain(self, tile: _Tile, acc: b.Vectors, first: b.Expr, last: b.Expr, group: b.Expr, block0: b.Expr) -> None:
        """Adds lines [first, last) of one group to `acc`. block0: first line of the block, where it is unpacked."""
        unpacked = tile.kb is not None and self.unpacks
        zeros = None
        if not self.integer and self.asymmetric and not unpacked:
            zeros = self.weight.zeros(tile.panels, group)

        def step(line: b.Expr, places: int) -> None:
            self.step(tile, acc, line, line - block0 if unpacked else None, places, zeros)

        if self.integer and self.groups > 1 and self.lines % self.group_lines == 0:
            # Every group is whole: a known, small number of turns is a loop whose end the CPU foresees.
            with T.serial(self.group_lines // _TURN) as turn:
                for line in range(_TURN):
                    step(b.let(first + (turn * _TURN + line)), LINE)
            return
        whole = b.let(T.min(last, self.whole_lines)) if self.tail else last
        with T.serial(first, whole) as line:
            step(line, LINE)
        if self.tail:
            with b.when(last == self.lines):
                step(b.let(T.int32(self.whole_lines)), self.tail)

    def step(
        self,
        tile: _Tile,
        acc: b.Vectors,
        line: b.Expr,
        wide_line: b.Expr | None,
        places: int,
        zeros: b.Vectors | None,
    ) -> None:
        """The first `places` elements of one line. wide_line: where the line is in the unpacked block."""
        where = [(panel, v) for panel in tile.panels for v in range(self.vectors)]
        vectors = len(where)
        kind = "int32" if self.integer else "float32"
        units = 2 if self.integer else places

        def packed(v: int) -> list[b.Expr]:
            panel, of_panel = where[v]
            if tile.fetch:
                self.weight.fetch(panel, line, of_panel, one_row=self.tile == 1)
            return self.weight.packed(panel, line, of_panel)

        def weight(words: list[b.Expr], v: int, unit: int) -> b.Expr:
            if self.integer:
                return self.weight.bytes_of(words)[unit]
            return self.weight.element(words, unit, None if zeros is None else zeros[v])

        if self.tile == 1:
            # The line's activations stay in registers, not its weights: there are fewer.
            values = b.Vectors(units, kind)
            for unit in range(units):
                values[unit] = self.activation(tile.x0, 0, line, unit)
            for v in range(vectors):
                words = packed(v)
                for unit in range(units):
                    acc[v] = self.multiply(acc[v], weight(words, v, unit), values[unit])
            return
        lines = [packed(v) for v in range(vectors)] if wide_line is None else []
        for unit in range(units):
            weights = b.Vectors(vectors, kind)
            for v in range(vectors):
                if wide_line is None:
                    weights[v] = weight(lines[v], v, unit)
                else:
                    at = (wide_line * (2 if self.integer else LINE) + unit) * self.columns + v * b.WIDTH
                    weights[v] = self.wide.vector(at)
            for i, r in enumerate(tile.rows):
                value = self.activation(tile.x0, r, line, unit)
                for v in range(vectors):
                    acc[i * vectors + v] = self.multiply(acc[i * vectors + v], weights[v], value)

    def multiply(self, acc: b.Expr, weight: b.Expr, value: b.Expr) -> b.Expr:
        """acc + weight · value: of four numbers a lane, or of one float."""
        if self.integer:
            return T.call_extern("int32x16", "llmc_dot_u8s8", acc, weight, value)
        return b.call("fma", value, weight, acc)

    def activation(self, x0: b.Expr, r: int, line: b.Expr, unit: int) -> b.Expr:
        """Word (integers) or element (floats) `unit` of a line of row r, in every lane."""
        if self.integer:
            return T.broadcast(self.x[x0 + (line * 2 + unit) * self.tile + r], b.WIDTH)
        if self.lanes == 1:
            return b.splat(self.x[x0 + (line * LINE + unit) * self.tile + r])
        word = self.x[x0 + (line * (LINE // 2) + unit // 2) * self.tile + r]
        return b.call("bf16_high" if unit % 2 else "bf16_low", T.broadcast(word, b.WIDTH))

    def scales(self, panels: Sequence[b.Expr], group: b.Expr) -> b.Vectors:
        found = b.Vectors(len(panels) * self.vectors)
        for i, panel in enumerate(panels):
            for v in range(self.vectors):
                at = (panel * self.groups + group) * self.columns + v * b.WIDTH
                found[i * self.vectors + v] = b.load_vector(self.k["scale"], at)
        return found

    def as_float(self, acc: b.Vectors, i: int, x0: b.Expr, r: int, group: b.Expr, zero: b.Expr | None) -> b.Expr:
        """A finished sum of one group."""
        if not self.integer:
            return acc[i]
        value = acc[i]
        if zero is not None:
            value = value + zero * T.broadcast(self.sum_of(x0, r, group), b.WIDTH)
        return T.Cast("float32x16", value)

    def zeros_of(self, panels: Sequence[b.Expr], group: b.Expr) -> b.Vectors | None:
        """Zero points that integer sums lack."""
        return self.weight.zeros(panels, group) if self.integer and self.asymmetric else None

    def merge(self, tile: _Tile, total: b.Vectors, acc: b.Vectors, group: b.Expr) -> None:
        """total += scale · acc"""
        vectors = len(tile.panels) * self.vectors
        scales, zeros = self.scales(tile.panels, group), self.zeros_of(tile.panels, group)
        for i, r in enumerate(tile.rows):
            for v in range(vectors):
                at = i * vectors + v
                value = self.as_float(acc, at, tile.x0, r, group, None if zeros is None else zeros[v])
                total[at] = b.call("fma", value, scales[v], total[at])

    def finish_row(self, tile: _Tile, i: int, r: int, total: b.Vectors) -> None:
        """Scales the sums of row r, the tile's i-th, adds bias and residual, and stores the row: to y, or where the
        gate finds it."""
        panels, x0 = tile.panels, tile.x0
        of_vector = [
            (unit, place, v) for unit, place in zip(tile.units, tile.places, strict=True) for v in range(self.vectors)
        ]
        only = self.groups == 1
        scales = self.scales(panels, T.int32(0)) if only else None
        zeros = self.zeros_of(panels, T.int32(0)) if only else None
        for at, (unit, place, v) in enumerate(of_vector):
            first = unit * self.columns + v * b.WIDTH
            count = b.WIDTH if self.width % self.columns == 0 else self.width - first
            value = total[i * len(of_vector) + at]
            if scales is not None:
                zero = None if zeros is None else zeros[at]
                value = self.as_float(total, i * len(of_vector) + at, x0, r, T.int32(0), zero)
                value = b.call("mul", value, scales[at])
            if self.integer:
                row_scale = T.reinterpret("float32", self.x[x0 + self.x_words * self.tile + r])
                value = b.call("mul", value, b.splat(row_scale))
            elif self.bits == 8:
                value = b.call("mul", value, b.splat(2.0**-24))  # of `element`; exact
            if self.bias:
                start = first if self.parts == 1 else tile.part * self.width + first
                value = b.call("add", value, b.load_vector(self.k["bias"], start, count))
            if self.gate:
                self.sums.store(value, place, tile.t_local, r, v)
                continue
            where = (tile.t * self.tile + r) * self.n + first
            if self.residual:
                value = b.call("add", value, b.load_vector(self.k["residual"], where, count))
            b.store_vector(self.y, value, where, count)
