"""The register tile of `linear_quant`: some rows times some panels over a block of K, its sums in registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.quant_layer import TURN, QuantLayer
from llmc.compiler.targets.cpu.kernels.quant_place import Fetch, Tile, Walk
from llmc.compiler.targets.cpu.kernels.quant_steps import SteppedLines
from llmc.compiler.targets.cpu.kernels.quant_weight import LINE, QuantWeight
from llmc.compiler.targets.cpu.kernels.sums import Sums

_ROWS_OF_GROUPS = 4  # rows whose sums of a group and of all groups fit the registers, with what a dot product needs


class TileWriter:
    """Emits register tiles of a kernel. sums: of tiles between blocks, or for the gate; wide: the unpacked block;
    wide_x: bf16 activations of a block as float32, [row tile][half of a word][words][rows]."""

    def __init__(
        self, layer: QuantLayer, weight: QuantWeight, kernel: b.Kernel, num_rows: b.Expr, sums: Sums | None,
        wide: b.Scratch | None, wide_x: b.Expr | None = None,
    ) -> None:  # fmt: skip
        self.layer, self.weight, self.k, self.num_rows = layer, weight, kernel, num_rows
        self.x, self.y = kernel["x"], kernel["y"]
        self._sums, self._wide, self._wide_x = sums, wide, wide_x

    @staticmethod
    def merges_in_memory(layer: QuantLayer, walk: Walk) -> bool:
        """Whether sums of all groups stay in memory, so that those of a group have the registers: as many chains of dot
        products as hide an instruction's latency. One that is emulated needs registers itself."""
        return layer.groups > 1 and walk.unpacked and (layer.int8_dot or not layer.integer)

    @property
    def sums(self) -> Sums:
        assert self._sums is not None
        return self._sums

    @property
    def wide(self) -> b.Scratch:
        assert self._wide is not None
        return self._wide

    def row_tile(
        self,
        t: b.Expr,
        t_local: b.Expr,
        units: Sequence[b.Expr],
        part: b.Expr,
        places: Sequence[b.Expr],
        walk: Walk,
        kb: b.Expr,
        fetch: Fetch,
    ) -> None:
        """Row tile t times block kb of panels `units` of a part of the weight.

        places: of each panel's sums between passes, t_local: the row tile's in them.
        """
        layer = self.layer
        t, t_local, units = b.let(t), b.let(t_local), [b.let(unit) for unit in units]
        panels = [b.let(layer.panel(part, unit)) for unit in units]
        x0, few_sums = b.let(t * layer.tile_words), layer.integer and layer.groups > 1
        split = few_sums and walk.unpacked and not self.merges_in_memory(layer, walk)
        step = min(layer.tile, _ROWS_OF_GROUPS) if split else layer.tile
        for first in range(0, layer.tile, step):
            rows = range(first, first + step)
            tile = Tile(t, t_local, rows, units, part, panels, list(places), x0, walk, kb, fetch)
            if first:
                with b.when(t * layer.tile + first < self.num_rows):
                    self.tile_body(tile)
            else:
                self.tile_body(tile)

    def tile_body(self, tile: Tile) -> None:
        layer = self.layer
        # Or constants of other loops, which LLVM would keep in registers, leave too few for the sums.
        b.do("forget_registers")
        t, kb, walk, vectors = tile.t, tile.kb, tile.walk, len(tile.panels) * layer.vectors
        of_vector = [(place, v) for place in tile.places for v in range(layer.vectors)]
        line0 = b.let(kb * walk.lines)
        line1 = b.let(T.min(line0 + walk.lines, layer.lines))
        acc = b.Vectors(len(tile.rows) * vectors, "int32" if layer.integer else "float32")
        total = b.Vectors(len(tile.rows) * vectors) if layer.groups > 1 else acc

        def each_row(body: Callable[[int, int], None]) -> None:
            for i, r in enumerate(tile.rows):
                if layer.tile == 1:
                    body(i, r)
                else:
                    with b.when(t * layer.tile + r < self.num_rows):
                        body(i, r)

        in_memory = self.merges_in_memory(layer, walk)

        def reload() -> None:
            for i, r in enumerate(tile.rows):
                for at, (place, v) in enumerate(of_vector):
                    value = self.sums.load(place, tile.t_local, r, v)
                    total[i * vectors + at] = T.reinterpret("int32x16", value) if layer.exact else value

        def partial() -> None:
            for i, r in enumerate(tile.rows):
                for at, (place, v) in enumerate(of_vector):
                    value = total[i * vectors + at]
                    value = T.reinterpret("float32x16", value) if layer.exact else value
                    self.sums.store(value, place, tile.t_local, r, v)

        def finish(i: int, r: int) -> None:
            if in_memory:
                for at, (place, v) in enumerate(of_vector):
                    total[i * vectors + at] = self.sums.load(place, tile.t_local, r, v)
            self.finish_row(tile, i, r, total)

        stepped = SteppedLines(self) if layer.steps and not walk.unpacked else None
        if stepped is not None:
            stepped.start(tile, acc)
        elif layer.groups == 1:
            self.start(tile, acc, T.int32(0))
        elif in_memory:
            with b.when(kb == 0):
                for r in tile.rows:
                    for place, v in of_vector:
                        self.sums.store(b.splat(0.0), place, tile.t_local, r, v)
        else:
            for i in range(len(tile.rows) * vectors):
                total[i] = b.splat(0.0)
        if walk.count > 1 and not in_memory:
            with b.when(kb > 0):
                reload()
        if stepped is not None:
            stepped.add(tile, acc, line0, line1)
        elif layer.groups == 1:
            self.chain(tile, acc, line0, line1, T.int32(0), line0)
        else:
            group0 = b.let(T.truncdiv(line0, layer.group_lines))
            group1 = b.let(T.truncdiv(line1 + (layer.group_lines - 1), layer.group_lines))
            with T.serial(group0, group1) as g:
                group = b.let(g)
                first = b.let(group * layer.group_lines)
                last = b.let(T.min(first + layer.group_lines, line1))
                self.start(tile, acc, group)
                self.chain(tile, acc, first, last, group, line0)
                self.merge(tile, None if in_memory else total, acc, group)
        if in_memory:
            with b.when(kb == walk.count - 1):
                each_row(finish)
        elif walk.count > 1:
            with T.If(kb < walk.count - 1):
                with T.Then():
                    partial()
                with T.Else():
                    each_row(finish)
        else:
            each_row(finish)

    def sum_of(self, x0: b.Expr, r: b.Expr, group: b.Expr) -> b.Expr:
        """Σ of the quantized activations of a row in a group, times WeightFormat.sum_factor."""
        layer = self.layer
        return self.x[x0 + (group + (layer.x_words + 1)) * layer.tile + r]

    def start(self, tile: Tile, acc: b.Vectors, group: b.Expr, rows: Sequence[b.Expr] | None = None) -> None:
        """The sums before the first element: what a fixed zero point takes off, or 0. rows: the tile's, if not all."""
        layer = self.layer
        vectors = len(tile.panels) * layer.vectors
        for i, r in enumerate(tile.rows if rows is None else rows):
            for v in range(vectors):
                if not layer.integer:
                    acc[i * vectors + v] = b.splat(0.0)
                elif layer.asymmetric:
                    acc[i * vectors + v] = T.broadcast(T.int32(0), b.WIDTH)
                else:
                    acc[i * vectors + v] = T.broadcast(self.sum_of(tile.x0, r, group), b.WIDTH)

    def chain(self, tile: Tile, acc: b.Vectors, first: b.Expr, last: b.Expr, group: b.Expr, block0: b.Expr) -> None:
        """Adds lines [first, last) of one group to `acc`. block0: first line of the block, where it is unpacked."""
        layer = self.layer
        unpacked = tile.walk.unpacked
        zeros = None
        if not layer.integer and layer.asymmetric and not unpacked:
            zeros = self.weight.zeros(tile.panels, group)

        def step(line: b.Expr, places: int) -> None:
            self.step(tile, acc, line, line - block0 if unpacked else None, places, zeros)

        def fetch(line: b.Expr, turn_lines: int) -> None:
            if tile.fetch.at_turn is not None:
                tile.fetch.at_turn(tile, b.let(T.truncdiv(line - block0, turn_lines)))

        if layer.groups > 1:
            fetch(first, layer.group_lines)
        if layer.integer and layer.groups > 1 and layer.lines % layer.group_lines == 0:
            # Every group is whole: a known, small number of turns is a loop whose end the CPU foresees. Where the sums
            # take the registers, a turn is a line: of a longer one LLVM moves loads ahead, and spills.
            at_once = 1 if self.merges_in_memory(layer, tile.walk) else TURN
            with T.serial(layer.group_lines // at_once) as turn:
                for line in range(at_once):
                    step(b.let(first + (turn * at_once + line)), LINE)
            return
        whole = b.let(T.min(last, layer.whole_lines)) if layer.tail else last
        if layer.groups > 1 or tile.fetch.at_turn is None:
            with T.serial(first, whole) as line:
                step(line, LINE)
        else:
            with T.serial(T.truncdiv(whole - first + (TURN - 1), TURN)) as turn:
                start = b.let(first + turn * TURN)
                fetch(start, TURN)
                with T.serial(start, b.let(T.min(start + TURN, whole))) as line:
                    step(line, LINE)
        if layer.tail:
            with b.when(last == layer.lines):
                step(b.let(T.int32(layer.whole_lines)), layer.tail)

    def step(
        self,
        tile: Tile,
        acc: b.Vectors,
        line: b.Expr,
        wide_line: b.Expr | None,
        places: int,
        zeros: b.Vectors | None,
    ) -> None:
        """The first `places` elements of one line. wide_line: where the line is in the unpacked block."""
        layer = self.layer
        where = [(panel, v) for panel in tile.panels for v in range(layer.vectors)]
        vectors = len(where)
        kind = "int32" if layer.integer else "float32"
        units = 2 if layer.integer else places
        units_of_word = (2 if layer.integer else LINE) // self.weight.line_words

        def weight(word: b.Expr, v: int, unit: int) -> b.Expr:
            if layer.integer:
                return self.weight.bytes_of(word, unit)
            return self.weight.element(word, unit, None if zeros is None else zeros[v])

        if layer.tile == 1:
            # The line's activations stay in registers, not its weights: there are fewer.
            values = b.Vectors(units, kind)
            for unit in range(units):
                values[unit] = self.activation(tile.x0, 0, line, unit)
            for v, (panel, of_panel) in enumerate(where):
                if tile.fetch.at_line is not None:
                    tile.fetch.at_line(line, v)
                of_line = [self.weight.word(panel, line, of_panel, i) for i in range(self.weight.line_words)]
                for unit in range(units):
                    acc[v] = self.multiply(acc[v], weight(of_line[unit // units_of_word], v, unit), values[unit])
            return
        words: list[b.Expr] = []
        halves = [] if self._wide_x is None or wide_line is None else self.halves_of(tile, wide_line)
        if tile.fetch.at_line is not None:
            for v in range(vectors):
                tile.fetch.at_line(line, v)
        for unit in range(units):
            if layer.lanes == 2 and unit % 2 and self._wide_x is None:
                # A word read again is free, as part of the operation; kept from its first half on it takes a register.
                b.do("forget_memory", b.at(self.x, 0))
            weights = b.Vectors(vectors, kind)
            if wide_line is None and unit % units_of_word == 0:
                # A word at a time: those of a whole line leave no register for the sums.
                words = [self.weight.word(panel, line, v, unit // units_of_word) for panel, v in where]
            for v in range(vectors):
                if wide_line is None:
                    weights[v] = weight(words[v], v, unit)
                else:
                    at = (wide_line * (2 if layer.integer else LINE) + unit) * layer.columns + v * b.WIDTH
                    weights[v] = self.wide.vector(at)
            for i, r in enumerate(tile.rows):
                if halves and self._wide_x is not None:
                    value = b.splat(self._wide_x[halves[unit % 2] + (unit // 2 * layer.tile + r)])
                else:
                    value = self.activation(tile.x0, r, line, unit)
                for v in range(vectors):
                    acc[i * vectors + v] = self.multiply(acc[i * vectors + v], weights[v], value)

    def multiply(self, acc: b.Expr, weight: b.Expr, value: b.Expr) -> b.Expr:
        """acc + weight · value: of four numbers a lane, or of one float."""
        layer = self.layer
        if layer.integer:
            return T.call_extern("int32x16", "llmc_dot_u8s8", acc, weight, value)
        return b.call("fma", value, weight, acc)

    def activation(self, x0: b.Expr, r: int, line: b.Expr, unit: int) -> b.Expr:
        """Word (integers) or element (floats) `unit` of a line of row r, in every lane."""
        layer = self.layer
        if layer.integer:
            return T.broadcast(self.x[x0 + (line * 2 + unit) * layer.tile + r], b.WIDTH)
        if layer.lanes == 1:
            return b.splat(self.x[x0 + (line * LINE + unit) * layer.tile + r])
        word = self.x[x0 + (line * (LINE // 2) + unit // 2) * layer.tile + r]
        return b.call("bf16_high" if unit % 2 else "bf16_low", T.broadcast(word, b.WIDTH))

    def halves_of(self, tile: Tile, wide_line: b.Expr) -> list[b.Expr]:
        """Where a line's activations start in `wide_x`, as low halves of words and as high ones."""
        words = tile.walk.lines * (LINE // 2)
        low = b.let((tile.t_local * 2 * words + wide_line * (LINE // 2)) * self.layer.tile)
        return [low, b.let(low + words * self.layer.tile)]

    def scales(self, panels: Sequence[b.Expr], group: b.Expr) -> b.Vectors:
        layer = self.layer
        found = b.Vectors(len(panels) * layer.vectors)
        for i, panel in enumerate(panels):
            for v in range(layer.vectors):
                at = (panel * layer.groups + group) * layer.columns + v * b.WIDTH
                found[i * layer.vectors + v] = b.load_vector(self.k["scale"], at)
        return found

    def as_float(self, acc: b.Vectors, i: int, x0: b.Expr, r: b.Expr, group: b.Expr, zero: b.Expr | None) -> b.Expr:
        """A finished sum of one group."""
        layer = self.layer
        if not layer.integer:
            return acc[i]
        value = acc[i]
        if zero is not None:
            value = value + zero * T.broadcast(self.sum_of(x0, r, group), b.WIDTH)
        return T.Cast("float32x16", value)

    def zeros_of(self, panels: Sequence[b.Expr], group: b.Expr) -> b.Vectors | None:
        """Zero points that integer sums lack."""
        layer = self.layer
        return self.weight.zeros(panels, group) if layer.integer and layer.asymmetric else None

    def merge(self, tile: Tile, total: b.Vectors | None, acc: b.Vectors, group: b.Expr) -> None:
        """total += scale · acc; total: None where it is in memory."""
        layer = self.layer
        vectors = len(tile.panels) * layer.vectors
        if total is None:
            # Or LLVM keeps them in registers, and spills.
            b.do("forget_memory", self.sums.address(tile.places[0], tile.t_local, 0, 0))
        scales, zeros = self.scales(tile.panels, group), self.zeros_of(tile.panels, group)
        for i, r in enumerate(tile.rows):
            for v in range(vectors):
                at = i * vectors + v
                value = self.as_float(acc, at, tile.x0, r, group, None if zeros is None else zeros[v])
                if total is not None:
                    total[at] = b.call("fma", value, scales[v], total[at])
                    continue
                where = (tile.places[v // layer.vectors], tile.t_local, r, v % layer.vectors)
                self.sums.store(b.call("fma", value, scales[v], self.sums.load(*where)), *where)

    def finish_row(self, tile: Tile, i: int, r: b.Expr, total: b.Vectors) -> None:
        """Scales the sums of row r, the tile's i-th, adds bias and residual, and stores the row: to y, or where the
        gate finds it."""
        layer = self.layer
        panels, x0 = tile.panels, tile.x0
        of_vector = [
            (unit, place, v) for unit, place in zip(tile.units, tile.places, strict=True) for v in range(layer.vectors)
        ]
        only = layer.groups == 1
        scales = self.scales(panels, T.int32(0)) if only else None
        zeros = self.zeros_of(panels, T.int32(0)) if only else None
        for at, (unit, place, v) in enumerate(of_vector):
            first = unit * layer.columns + v * b.WIDTH
            count = b.WIDTH if layer.width % layer.columns == 0 else layer.width - first
            value = total[i * len(of_vector) + at]
            if scales is not None:
                zero = None if zeros is None else zeros[at]
                value = self.as_float(total, i * len(of_vector) + at, x0, r, T.int32(0), zero)
                value = b.call("mul", value, scales[at])
            if layer.integer:
                row_scale = T.reinterpret("float32", self.x[x0 + layer.x_words * layer.tile + r])
                value = b.call("mul", value, b.splat(row_scale))
            elif layer.bits == 8:
                value = b.call("mul", value, b.splat(2.0**-24))  # of `element`; exact
            if layer.bias:
                start = first if layer.parts == 1 else tile.part * layer.width + first
                value = b.call("add", value, b.load_vector(self.k["bias"], start, count))
            if layer.gated:
                self.sums.store(value, place, tile.t_local, r, v)
                continue
            where = (tile.t * layer.tile + r) * layer.n + first
            if layer.residual:
                value = b.call("add", value, b.load_vector(self.k["residual"], where, count))
            b.store_vector(self.y, value, where, count)
