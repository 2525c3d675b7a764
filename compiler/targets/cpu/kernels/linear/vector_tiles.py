"""Tiles in vector registers: some rows times some panels over a block of K."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.linear.epilogue import Epilogue
from llmc.compiler.targets.cpu.kernels.linear.micro.base import MicroKernel
from llmc.compiler.targets.cpu.kernels.linear.places import Fetch, Tile, Walk
from llmc.compiler.targets.cpu.kernels.linear.problem import TURN, Problem
from llmc.compiler.targets.cpu.kernels.linear.readers.base import OfGroup, Reader
from llmc.compiler.targets.cpu.kernels.linear.sums import Sums

# rows whose sums of a group and of all groups fit the registers, beside those that a dot product needs
_ROWS_OF_GROUPS = 4
# vectors of sums beside which four activations of a row, weights and constants fit the registers
_FEW_VECTORS = 12


def merges_in_memory(p: Problem, walk: Walk) -> bool:
    """Whether sums of all groups stay in memory, so that a group's sums have the registers. They then form enough
    chains of dot products to hide an instruction's latency. An emulated instruction needs registers itself."""
    return p.grouped and walk.unpacked and (p.target.int8_dot or not p.integer)


class VectorTiles:
    """Emits tiles of a kernel. sums: of tiles between blocks, or for the activation. wide: the unpacked block."""

    def __init__(
        self, p: Problem, k: b.Kernel, num_rows: b.Expr, reader: Reader, micro: MicroKernel, sums: Sums | None,
        wide: b.Scratch | None,
    ) -> None:  # fmt: skip
        self.p, self.k, self.num_rows, self.reader, self.micro = p, k, num_rows, reader, micro
        self.epilogue = Epilogue(p, k, reader, micro, sums)
        self._sums, self._wide = sums, wide

    @property
    def sums(self) -> Sums:
        assert self._sums is not None
        return self._sums

    @property
    def wide(self) -> b.Scratch:
        assert self._wide is not None
        return self._wide

    def with_sums(self, places: int) -> VectorTiles:
        """The same, with sums of one row tile in `places` places if the activation needs them and has none yet."""
        p = self.p
        if self._sums is not None or not p.activated:
            return self
        sums = Sums(places, 1, p.tile, p.columns)
        return VectorTiles(p, self.k, self.num_rows, self.reader, self.micro, sums, self._wide)

    def row_tile(
        self, t: b.Expr, t_local: b.Expr, units: Sequence[b.Expr], part: b.Expr, places: Sequence[b.Expr], walk: Walk,
        kb: b.Expr, fetch: Fetch, length: b.Expr | None = None, fewer_rows: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Row tile t times block kb of panels `units` of a part of the weight.

        places: where each panel's sums are stored between passes. t_local: number of the row tile there. length: of the
        block; None: the whole block. fewer_rows: see `Plan`.
        """
        p, let = self.p, self.p.let
        t, t_local, units = let(t), let(t_local), [let(unit) for unit in units]
        columns = [p.name(unit * p.columns) for unit in units]
        length = p.lines if length is None else length
        panels = [b.let(p.panel(part, unit)) for unit in units]
        x0 = b.let(self.micro.start_of(t, t_local)) if p.quantized else t * p.lines * p.tile
        split = p.integer and p.grouped and walk.unpacked and not merges_in_memory(p, walk)
        step = min(p.tile, _ROWS_OF_GROUPS) if split else p.tile

        def compute(first: int, end: int) -> None:
            where = range(first, end), units, part, panels, list(places), columns
            self._tile(Tile(t, t_local, *where, x0, walk, kb, fetch, length))

        if fewer_rows and step == p.tile:
            valid = b.let(T.min(self.num_rows - t * p.tile, p.tile))
            for below, most in itertools.pairwise((0, *fewer_rows, p.tile)):
                with b.when(T.And(valid > below, valid <= most)):
                    compute(0, most)
            return
        for first in range(0, p.tile, step):
            with b.when(t * p.tile + first < self.num_rows) if first else nullcontext():
                compute(first, first + step)

    def write_activated(
        self, unit: b.Expr, places: Sequence[b.Expr], t: b.Expr, t_local: b.Expr,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """As `ActivatedOutput.write`."""
        assert self.p.activation is not None
        self.p.activation.write(
            self.k["y"], self.sums, places, self.p.let(unit), self.p.let(t), t_local, self.num_rows, meanwhile
        )

    def _tile(self, tile: Tile) -> None:
        p, kb, walk = self.p, tile.kb, tile.walk
        if p.quantized or p.activated:
            # Otherwise LLVM keeps constants of other loops in registers, and too few remain for the sums.
            b.do("forget_registers")
        vectors = len(tile.panels) * p.vectors
        line0 = self.p.let(kb * walk.lines)
        line1 = self.p.let(T.min(line0 + walk.lines, p.lines))
        acc = b.Vectors(len(tile.rows) * vectors, self.micro.sums)
        total = b.Vectors(len(tile.rows) * vectors) if p.grouped else acc
        lines = None if walk.unpacked else self.reader.lines(self.micro)
        in_memory = merges_in_memory(p, walk)
        if lines is not None:
            lines.start(tile, acc)
        elif not p.grouped:
            self.start(tile, acc, T.int32(0))
        elif in_memory:
            with b.when(kb == 0):
                self._each(tile, lambda at, where: self.sums.store(b.splat(0.0), *where))
        else:
            for i in range(len(tile.rows) * vectors):
                total[i] = b.splat(0.0)
        if walk.count > 1 and not in_memory:
            with b.when(kb > 0):
                self.reload(tile, total)
        if lines is not None:
            lines.add(tile, acc, line0, line1)
        elif not p.grouped:
            self._chain(tile, acc, line0, line1, T.int32(0), line0)
        else:
            self._groups(tile, acc, None if in_memory else total, line0, line1)
        if in_memory:
            with b.when(kb == walk.count - 1):
                self._finish(tile, total, in_memory=True)
        elif walk.count > 1:
            # The order of the two in memory was chosen by measuring the machine code of each kind.
            hold, finish = (partial(branch, tile, total) for branch in (self.hold, self._finish))
            with T.If(kb < walk.count - 1 if p.quantized else kb == walk.count - 1):
                with T.Then():
                    (hold if p.quantized else finish)()
                with T.Else():
                    (finish if p.quantized else hold)()
        else:
            self._finish(tile, total)

    # ---- sums between blocks ----------------------------------------------------------------------------------------

    def _each(self, tile: Tile, body: Callable[[int, tuple[b.Expr, ...]], None], rows: Sequence[int] = ()) -> None:
        """Each vector of sums of a tile: its number and its place in memory."""
        of_row = [(place, v) for place in tile.places for v in range(self.p.vectors)]
        for i, r in enumerate(tile.rows):
            for at, (place, v) in enumerate(of_row):
                if not rows or i in rows:
                    body(i * len(of_row) + at, (place, tile.t_local, r, v))

    def reload(self, tile: Tile, total: b.Vectors, rows: Sequence[int] = ()) -> None:
        """The sums stored by `hold`. rows: numbers of the tile's rows; empty: all."""

        def load(at: int, where: tuple[b.Expr, ...]) -> None:
            value = self.sums.load(*where)
            total[at] = T.reinterpret("int32x16", value) if self.p.exact else value

        self._each(tile, load, rows)

    def hold(self, tile: Tile, total: b.Vectors) -> None:
        """Stores the sums of a tile."""

        def store(at: int, where: tuple[b.Expr, ...]) -> None:
            self.sums.store(T.reinterpret("float32x16", total[at]) if self.p.exact else total[at], *where)

        self._each(tile, store)

    def _finish(self, tile: Tile, total: b.Vectors, *, in_memory: bool = False) -> None:
        p = self.p
        if not p.quantized:
            self.epilogue.add_bias(tile, total)
            if p.activated:
                self.hold(tile, total)
                return
        for i, r in enumerate(tile.rows):
            with b.when(tile.t * p.tile + r < self.num_rows) if p.tile > 1 else nullcontext():
                if in_memory:
                    self.reload(tile, total, [i])
                self.epilogue.row(tile, i, r, total, biased=not p.quantized)

    # ---- groups of numbers ------------------------------------------------------------------------------------------

    def start(self, tile: Tile, acc: b.Vectors, group: b.Expr, rows: Sequence[b.Expr] | None = None) -> None:
        """The sums of a group before the first element. rows: some of the tile's rows; None: all."""
        vectors = len(tile.panels) * self.p.vectors
        for i, r in enumerate(tile.rows if rows is None else rows):
            for v in range(vectors):
                acc[i * vectors + v] = self.micro.start(tile.x0, r, group)

    def _groups(self, tile: Tile, acc: b.Vectors, total: b.Vectors | None, line0: b.Expr, line1: b.Expr) -> None:
        lines = self.p.group_lines
        group0, group1 = b.let(T.truncdiv(line0, lines)), b.let(T.truncdiv(line1 + (lines - 1), lines))
        with T.serial(group0, group1) as g:
            group = b.let(g)
            first = b.let(group * lines)
            last = b.let(T.min(first + lines, line1))
            if tile.fetch.at_group is not None:
                tile.fetch.at_group(group)
            self.start(tile, acc, group)
            self._chain(tile, acc, first, last, group, line0)
            self.merge(tile, total, acc, group)

    def merge(self, tile: Tile, total: b.Vectors | None, acc: b.Vectors | list[b.Expr], group: b.Expr) -> None:
        """total += scale · acc + offset · Σ x. total None: it is in memory."""
        p = self.p
        if total is None:
            # Otherwise LLVM keeps them in registers, and spills.
            b.do("forget_memory", self.sums.address(tile.places[0], tile.t_local, 0, 0))
        vectors = len(tile.panels) * self.p.vectors
        reader, of_scale = self.reader, p.scale_group(group)
        scales, zeros = reader.scales(tile.panels, of_scale), reader.zeros_of_sums(tile.panels, of_scale)
        offsets = reader.offsets(tile.panels, of_scale)
        assert scales is not None

        def merge(at: int, where: tuple[b.Expr, ...]) -> None:
            v, r = at % vectors, where[2]
            value = self.micro.as_float(acc[at], None if zeros is None else zeros[v], tile.x0, r, group)
            merged = b.call("fma", value, scales[v], self.sums.load(*where) if total is None else total[at])
            if offsets is not None:
                merged = b.call("fma", self.micro.sum_of_row(tile.x0, r, group), offsets[v], merged)
            if total is None:
                self.sums.store(merged, *where)
            else:
                total[at] = merged

        self._each(tile, merge)

    # ---- lines ------------------------------------------------------------------------------------------------------

    def _chain(self, tile: Tile, acc: b.Vectors, first: b.Expr, last: b.Expr, group: b.Expr, block0: b.Expr) -> None:
        """Adds lines [first, last) of one group to `acc`. block0: first line of the block."""
        p, fetch = self.p, tile.fetch
        of_group = None if tile.walk.unpacked else self.reader.group_of(tile.panels, group)

        def step(line: b.Expr, units: int = self.reader.units) -> None:
            self._step(tile, acc, line, line - block0, units, of_group)

        def turn(line: b.Expr, lines: int) -> None:
            if fetch.at_turn is not None:
                fetch.at_turn(tile, b.let(T.truncdiv(line - block0, lines)))

        if not p.quantized:
            with T.serial(tile.length) as q:
                if fetch.before_line is not None:
                    fetch.before_line(q)
                self._step(tile, acc, q + tile.kb * tile.walk.lines, q, self.reader.units, of_group)
            return
        if p.grouped:
            turn(first, p.group_lines)
        if (p.integer or p.copied) and p.grouped and p.lines % p.group_lines == 0:
            # If every group is whole, the loop has a small constant trip count, whose end the CPU predicts. If the sums
            # take the registers, a turn is one line: with longer turns LLVM moves loads ahead, and spills.
            alone = merges_in_memory(p, tile.walk) or p.fixed or (p.paired and p.tile > 1)
            at_once = 1 if alone else min(TURN, p.group_lines)
            with T.serial(p.group_lines // at_once) as i:
                for line in range(at_once):
                    step(b.let(first + (i * at_once + line)))
            return
        whole = b.let(T.min(last, p.whole_lines)) if p.tail else last
        if p.grouped or fetch.at_turn is None:
            with T.serial(first, whole) as line:
                step(line)
        else:
            with T.serial(T.truncdiv(whole - first + (TURN - 1), TURN)) as i:
                start = b.let(first + i * TURN)
                turn(start, TURN)
                with T.serial(start, b.let(T.min(start + TURN, whole))) as line:
                    step(line)
        if p.tail:
            with b.when(last == p.lines):
                step(b.let(T.int32(p.whole_lines)), p.tail)

    def _step(
        self, tile: Tile, acc: b.Vectors, line: b.Expr, local: b.Expr, units: int, of_group: OfGroup | None
    ) -> None:
        """The first `units` operands of one line, line `local` of the block."""
        p, reader, micro, unpacked = self.p, self.reader, self.micro, tile.walk.unpacked
        where = [(panel, v) for panel in tile.panels for v in range(p.vectors)]
        vectors = len(where)
        if p.tile == 1:
            self._step_of_row(tile, acc, line, local, units, of_group)
            return
        value = micro.values(tile, line, local)
        if tile.fetch.at_line is not None:
            for at in range(vectors):
                tile.fetch.at_line(line, at)
        words: list[b.Expr] = []
        for unit in range(units):
            if p.tile > 1 and micro.rereads(unit):
                b.do("forget_memory", b.at(micro.x, 0))
            # An operand that is a word in memory becomes an operand of the instruction.
            weights = [None] * vectors if reader.units == 1 else b.Vectors(vectors, reader.dtype)
            of_unit = reader.word_of(unit)
            if not unpacked and (unit == 0 or of_unit != reader.word_of(unit - 1)):
                # One word at a time: the words of a whole line would leave no registers for the sums.
                words = [reader.word(panel, line, v, of_unit) for panel, v in where]
            for at in range(vectors):
                if unpacked:
                    weights[at] = self.wide.vector((local * reader.units + unit) * p.columns + at * b.WIDTH)
                else:
                    weights[at] = reader.operand_of(words[at], unit, of_group, at)
            for i, r in enumerate(tile.rows):
                for at in range(vectors):
                    acc[i * vectors + at] = micro.multiply(acc[i * vectors + at], weights[at], value(r, unit))

    def _step_of_row(
        self, tile: Tile, acc: b.Vectors, line: b.Expr, local: b.Expr, units: int, of_group: OfGroup | None
    ) -> None:
        """The same for one row. A few of its activations stay in registers, rather than weights."""
        reader, micro, fetch = self.reader, self.micro, tile.fetch
        where = [(panel, v) for panel in tile.panels for v in range(self.p.vectors)]
        at_once = 4 if len(where) <= _FEW_VECTORS else 2
        values, value = b.Vectors(at_once, reader.dtype), micro.values(tile, line, local)
        for first in range(0, units, at_once):
            some = range(first, min(first + at_once, units))
            if first:
                # Otherwise LLVM keeps words in registers, which are free to read again.
                b.do("forget_memory", b.at(reader.w, 0))
            for unit in some:
                values[unit - first] = value(0, unit)
            for at, (panel, v) in enumerate(where):
                if fetch.at_line is not None and first == 0:
                    fetch.at_line(line, at)
                words = {i: reader.word(panel, line, v, i) for i in sorted({reader.word_of(unit) for unit in some})}
                for unit in some:
                    weight = reader.operand_of(words[reader.word_of(unit)], unit, of_group, at)
                    acc[at] = micro.multiply(acc[at], weight, values[unit - first])
