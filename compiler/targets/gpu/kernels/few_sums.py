"""Sums of few rows of x: a warp's chains of products, and how scale groups of several warps add up in their order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.gpu.kernels.fragments import call
from llmc.compiler.targets.gpu.kernels.groups import Shared, unrolled
from llmc.compiler.targets.gpu.kernels.row_tiles import Tile
from llmc.compiler.targets.gpu.kernels.short_groups import OwnScales, ShortGroups
from llmc.compiler.targets.gpu.kernels.tensor_sums import HALF, Layer, scaled, write_result
from llmc.compiler.targets.gpu.linear_forms import FewForm
from llmc.compiler.targets.gpu.tensor_cores import MATRIX_COLUMNS, MATRIX_ROWS, WARP
from llmc.compiler.targets.reference.kernels.frame import Array, Expr, let, when

_RESULTS = 4
"""Results of a lane per product: two rows of the weight by two of x."""
_PRODUCT = WARP * _RESULTS


class FewSums:
    """Sums of a unit. Warps that share it make chains of all its results, and each finishes a part of them.

    A lane finishes `halves` weight rows by `odds` rows of x of a product: 2 by 2 alone, 1 by 2 with another warp, and 1
    by 1 with three. unit, split: of this warp.
    """

    def __init__(self, of: Layer, form: FewForm, memory: Shared, unit: Expr, split: Expr) -> None:
        self._of, self._form, self._memory, self._unit, self._split = of, form, memory, unit, split
        self._begin = form.stages * form.stage_bytes // 4
        layer, parts, tiles = of.layer, of.parts, form.tiles
        self._halves, self._odds = 2 if form.splits == 1 else 1, 1 if form.splits == 4 else 2
        self._first = let(split * (_RESULTS // form.splits))  # of the results of a product
        self._within = let(of.of_row * 4 + of.lane)
        self._kind = "int32" if layer.dtype == "i8" else "float32"
        self._chain = Array(parts * tiles * _RESULTS, self._kind)
        self._total = Array(parts * tiles * self._halves * self._odds)
        count = form.groups
        self._scale = Array(count * parts * self._halves) if layer.length and not layer.short else None
        self._short = ShortGroups(layer, 2 * parts) if layer.short else None
        if self._short is not None:
            assert of.matrix is not None
            self._scales = OwnScales(of.k, layer, of.matrix, self._short)
        self._sums = Array(count * tiles * self._odds, "int32") if of.int8 is not None else None
        self._asymmetric = layer.asymmetric and of.int8 is not None
        self._zero = Array(count * parts * self._halves, "int32") if self._asymmetric else None
        # Zero points that are subtracted from numbers, of the groups that this warp multiplies.
        self._own_groups = max(1, count // form.splits)
        self._offset = Array(self._own_groups * parts * 2, "int32") if of.weight.zeros else None

    def _half(self, h: Expr) -> Expr:
        return h if self._halves == 2 else T.truncdiv(self._first, 2)

    def _odd(self, o: Expr) -> Expr:
        return o if self._odds == 2 else T.truncmod(self._first, 2)

    def _place(self, tile: Expr, o: Expr) -> Expr:
        """The place in the tile of a result that this lane finishes."""
        return let(self._of.lane * 2 + tile * MATRIX_COLUMNS + self._odd(o))

    def _weight_rows(self, column: Expr) -> list[Expr]:
        """The weight rows of a column, by part."""
        of, base = self._of, self._tile.base
        return [let(base + part * of.columns + T.min(column, of.columns - 1)) for part in range(of.parts)]

    def begin(self, tile: Tile, first_column: Expr) -> None:
        """first_column: of the group."""
        of, form = self._of, self._form
        self._tile = tile
        self._column = column = let(first_column + self._unit * MATRIX_ROWS + of.of_row)
        self._rows = [self._weight_rows(let(column + self._half(h) * HALF)) for h in range(self._halves)]
        self._stored_rows = [self._weight_rows(let(column + half * HALF)) for half in range(2)]
        with T.unroll(of.parts * form.tiles * _RESULTS) as i:
            self._chain[i] = T.Cast(self._kind, T.int32(0))
        with T.unroll(of.parts * form.tiles * self._halves * self._odds) as i:
            self._total[i] = T.float32(0.0)
        if of.layer.length and not of.layer.grouped:
            self._load_scales(T.int32(0))
            self._load_offsets(T.int32(0))
        self._load_short(T.int32(0))

    def _load_short(self, stage: Expr) -> None:
        """Asks for the scales of the warp's span of a stage."""
        if self._short is not None:
            rows = [row for part in range(self._of.parts) for row in (pair[part] for pair in self._stored_rows)]
            self._scales.load(rows, let(stage * self._form.splits + self._split))

    def _group(self, stage: Expr, number: Expr) -> Expr:
        """A scale group of a stage; the last one for those that there are not."""
        assert self._of.matrix is not None
        of_stage, depth = self._of.layer.group_steps, self._form.depth
        first = T.truncdiv(stage * depth, of_stage) if depth < of_stage else stage * self._form.groups
        return let(T.min(first + number, self._of.matrix.scales - 1))

    def enter(self, stage: Expr) -> None:
        """Before the wait for a stage: asks for what its groups are scaled by, or the short ones of the next stage."""
        if self._short is not None:
            self._scales.take()
            self._next_stage = let(stage + 1)
            if self._scales.ahead:
                self._load_short(self._next_stage)
            return
        if self._of.layer.grouped:
            self._load_offsets(stage)
            if not self._form.passed:
                self._load_scales(stage)

    def _load_offsets(self, stage: Expr) -> None:
        if self._offset is None:
            return
        of = self._of
        assert of.matrix is not None
        for own in range(self._own_groups):
            group = self._group(stage, self._split * self._own_groups + own)
            for half, rows in enumerate(self._stored_rows):
                for part, row in enumerate(rows):
                    zero = of.matrix.of_group(of.k, "zero", row, let(group * of.matrix.group_size))
                    self._offset[(own * of.parts + part) * 2 + half] = T.Cast("int32", zero)

    def _load_scales(self, stage: Expr) -> None:
        of = self._of
        if self._short is not None:
            return
        assert self._scale is not None
        assert of.matrix is not None
        for number in range(self._form.groups):
            group = self._group(stage, T.int32(number))
            for part in range(of.parts):
                for h in range(self._halves):
                    row, at = self._rows[h][part], self._fact(number, part, h)
                    self._scale[at] = of.matrix.scale(of.k, row, group)
                    if self._zero is not None:
                        zero = of.matrix.of_group(of.k, "zero", row, let(group * of.matrix.group_size))
                        self._zero[at] = T.Cast("int32", zero)
            if self._sums is None or of.int8 is None:
                continue
            for tile in range(self._form.tiles):
                for o in range(self._odds):
                    row = self._tile.row(let(T.min(self._place(tile, o), self._tile.count - 1)))
                    at = (number * self._form.tiles + tile) * self._odds + o
                    self._sums[at] = of.int8_word(row, (of.int8.number_words + 1) + group)

    def _fact(self, group: int, part: int, half: int) -> int:
        return (group * self._of.parts + part) * self._halves + half

    def multiply(self, i: int, stored: list[list[Array]], x: Callable[[int, int], list[Expr]]) -> None:
        """Multiplies the warp's step `i` of a stage. stored: a lane's part of two weight rows, by part."""
        of, form = self._of, self._form
        own = i // of.layer.group_steps if self._own_groups > 1 else 0
        words = [
            [of.weight.words(one, self._offset_of(own, part, half)) for half, one in enumerate(pair)]
            for part, pair in enumerate(stored)
        ]
        if self._short is not None:
            self._scales.enter(i)
            if i == form.warp_steps - 1 and not self._scales.ahead:
                self._load_short(self._next_stage)
            for tile in range(form.tiles):
                places = [(part * form.tiles + tile) * _RESULTS for part in range(of.parts)]
                self._short.add([(low, high) for low, high in words], x(i, tile), self._chain, places)
            return
        for tile in range(form.tiles):
            b = x(i, tile)
            for part, (low, high) in enumerate(words):
                c = self._chain.address((part * form.tiles + tile) * _RESULTS)
                for half in (0, 2):
                    a = (low[half], high[half], low[half + 1], high[half + 1])
                    call(f"llmc_mma_{of.layer.dtype}", c, *a, b[half], b[half + 1])

    def _offset_of(self, own: int, part: int, half: int) -> Expr:
        return T.int32(0) if self._offset is None else self._offset[(own * self._of.parts + part) * 2 + half]

    def end_step(self, stage: Expr, i: int) -> None:
        """Behind the warp's step `i` of a stage: ends a scale group, where one ends here."""
        layer, form = self._of.layer, self._form
        if not layer.grouped:
            return
        of_group = layer.group_steps
        if form.depth < of_group:
            if i == form.depth - 1:
                with when(T.truncmod((stage + 1) * form.depth, of_group) == 0):
                    self._fold(0, self._own_chain)
        elif (i + 1) % of_group == 0:
            number = i // of_group
            if form.passed:
                self._put(self._begin + self._passed(stage, self._split * self._own_groups + number))
            else:
                self._fold_of(stage, number, self._own_chain)

    def _passed(self, stage: Expr, number: Expr) -> Expr:
        """Where in shared memory the sums of a stage's scale group begin, behind `_begin`."""
        form = self._form
        unit = (T.truncmod(stage, 2) * form.units + self._unit) * form.groups + number
        return let(unit * (self._of.parts * form.tiles * _PRODUCT))

    def _put(self, begin: Expr) -> None:
        """Writes the chains to shared memory, and begins new ones."""
        at = let(begin + self._within)
        for product in range(self._of.parts * self._form.tiles):
            for result in range(_RESULTS):
                value = self._chain[product * _RESULTS + result]
                self._memory[at + (product * _PRODUCT + result * WARP)] = (
                    T.Cast("uint32", value) if self._kind == "int32" else T.reinterpret("uint32", value)
                )
                self._chain[product * _RESULTS + result] = T.Cast(self._kind, T.int32(0))

    def _got(self, begin: Expr, product: int, h: int, o: int) -> Expr:
        """A sum that `_put` wrote, one of those that this lane finishes."""
        result = self._first + (2 * h + o)
        word = self._memory[let(begin + self._within + product * _PRODUCT + result * WARP)]
        return T.Cast("int32", word) if self._kind == "int32" else T.reinterpret("float32", word)

    def _own_chain(self, product: int, h: int, o: int) -> Expr:
        return self._chain[product * _RESULTS + 2 * h + o]

    def _fold_of(self, stage: Expr, number: int, chain: Callable[[int, int, int], Expr]) -> None:
        """Adds a stage's scale group, if the row has it."""
        layer, form = self._of.layer, self._form
        groups = -(-layer.steps // layer.group_steps)
        if groups % form.groups == 0:
            self._fold(number, chain)
            return
        with when(stage * form.groups + number < groups):
            self._fold(number, chain)

    def _fold(self, number: int, chain: Callable[[int, int, int], Expr]) -> None:
        """Adds a scale group. chain: its sums, by product, half and odd."""
        of, form = self._of, self._form
        for part in range(of.parts):
            for tile in range(form.tiles):
                for h in range(self._halves):
                    for o in range(self._odds):
                        product, fact = part * form.tiles + tile, self._fact(number, part, h)
                        if self._scale is None:  # of short groups, what they have is scaled
                            at = self._at(product, h, o)
                            self._total[at] = self._total[at] + chain(product, h, o)
                            continue
                        sums = None
                        if self._sums is not None:
                            zero = T.int32(1) if self._zero is None else self._zero[fact]
                            sums = zero * self._sums[(number * form.tiles + tile) * self._odds + o]
                        at = self._at(product, h, o)
                        self._total[at] = scaled(chain(product, h, o), self._scale[fact], self._total[at], sums)
        if not form.passed:
            with T.unroll(of.parts * form.tiles * _RESULTS) as i:
                self._chain[i] = T.Cast(self._kind, T.int32(0))

    def _at(self, product: Expr, h: Expr, o: Expr) -> Expr:
        return (product * self._halves + h) * self._odds + o

    def add_passed(self, stage: Expr) -> None:
        """Adds the scale groups that warps passed to each other in the stage before."""
        if not self._form.passed:
            return
        with when(stage > 0):
            self._add_passed(let(stage - 1))
        self._load_scales(stage)

    def _add_passed(self, stage: Expr) -> None:
        for number in range(self._form.groups):
            begin = let(self._begin + self._passed(stage, T.int32(number)))
            self._fold_of(stage, number, partial(self._got, begin))

    def share(self) -> None:
        """Behind the last stage, whose memory is free: gives the chains to the warps that finish them."""
        if self._form.splits > 1 and not self._form.passed:
            self._put(self._shared(self._split))

    def _shared(self, split: Expr) -> Expr:
        unit = self._unit * self._form.splits + split
        return let(unit * (self._of.parts * self._form.tiles * _PRODUCT))

    def end(self, stages: int) -> None:
        """Behind the last stage."""
        layer, form = self._of.layer, self._form
        if form.passed:
            self._add_passed(T.int32(stages - 1))
        elif layer.grouped:
            # The last stage may end past the row, and there have ended the group.
            if form.depth < layer.group_steps and stages * form.depth % layer.group_steps:
                self._fold(0, self._own_chain)
        elif form.splits > 1:
            begins = [self._shared(T.int32(split)) for split in range(form.splits)]
            self._fold(0, lambda product, h, o: let(sum(self._got(begin, product, h, o) for begin in begins)))
        elif layer.length:
            self._fold(0, self._own_chain)
        else:
            with T.unroll(self._of.parts * form.tiles * _RESULTS) as i:
                self._total[i] = self._chain[i]

    def write(self) -> None:
        """Writes what this lane finishes."""
        of = self._of
        with unrolled(self._form.tiles) as tile, unrolled(self._odds) as o:
            place = self._place(tile, o)
            with when(place < self._tile.count):
                row = self._tile.row(place)
                with unrolled(self._halves) as h:
                    products = [part * self._form.tiles + tile for part in range(of.parts)]
                    totals = [self._total[self._at(product, h, o)] for product in products]
                    column = let(self._column + self._half(h) * HALF)
                    write_result(of, row, column, self._weight_rows(column), totals)
