"""linear, linear_quant and head_linear without tensor cores: eight neighbouring items share a weight row.

Bits depend neither on the number of rows nor on the form in which a tile is computed (`plain_sums.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.gpu.kernels.groups import calling, some, sync
from llmc.compiler.targets.gpu.kernels.plain_sums import Block, Meeting, Sums, add_integers, add_words
from llmc.compiler.targets.gpu.kernels.weight_reads import FloatReads, NumberReads, WordReads
from llmc.compiler.targets.gpu.kernels.x_reads import ByteRows, FloatRows, WordRows
from llmc.compiler.targets.gpu.plain_forms import CHAINS, FORMS, PlainForm
from llmc.compiler.targets.reference.kernels.experts import check_index
from llmc.compiler.targets.reference.kernels.frame import Expr, Frame, let, row_width, when
from llmc.compiler.targets.reference.kernels.linear import activated, activated_dtype
from llmc.compiler.targets.reference.kernels.matrices import matrix_of
from llmc.compiler.targets.reference.kernels.matrix import IntegerMatrix
from llmc.compiler.targets.reference.kernels.rows_int8 import Int8Rows

Scaled = Callable[[Frame, Expr, Expr, Expr], Expr]
"""(frame, sum, row of x, weight row) -> the sum with its scales."""


class _Layer:
    """inputs: dtypes of x and the weight's operands. sums: how products are added. scaled: what becomes of a sum."""

    def __init__(self, spec: KernelSpec) -> None:
        p = spec.as_dict()
        width, act = int(p["k"]), str(p.get("act_dtype", "f32"))
        self.scaled: Scaled = lambda _, total, row, weight_row: total
        if not spec.op.endswith("_quant"):
            dtype = str(p["weight_dtype"])
            reads = FloatReads(dtype, width)
            # Only heads state a stride: theirs are parts of longer rows.
            x = FloatRows(act, int(p.get("stride", row_width(width, act))), reads.count)
            self.inputs, self.sums = {"x": act, "weight": dtype}, Sums(x, reads, width)
            return
        matrix = matrix_of(p, width)
        self.inputs = {"x": act, **matrix.operands()}
        if act != "i8":
            numbers = NumberReads(matrix, matrix.value, "float32", matrix.group_size)
            self.sums = Sums(FloatRows(act, row_width(width, act), numbers.count), numbers, width)
            return
        assert isinstance(matrix, IntegerMatrix)
        rows, one = Int8Rows(width, matrix.scales), matrix.scales == 1
        length = width if one else matrix.group_size
        if matrix.fits_bytes and width % 4 == 0 and length % 4 == 0:
            words = WordReads(matrix, length)
            of_group = (0, None) if one else (length // 4, matrix.scale)
            self.sums = Sums(WordRows(rows, words.count), words, width // 4, add_words, *of_group)
        else:
            numbers = NumberReads(matrix, matrix.whole, "int32", length)
            of_group = (0, None) if one else (length, matrix.scale)
            self.sums = Sums(ByteRows(rows, numbers.count), numbers, width, add_integers, *of_group)

        def scaled(k: Frame, total: Expr, row: Expr, weight_row: Expr) -> Expr:
            found = T.Cast("float32", total) * matrix.scale(k, weight_row, T.int32(0)) if one else total
            return found * rows.scale(k, "x", row)

        self.scaled = scaled


class _Tiles:
    """Tiles of rows of x by columns, which groups take in turn."""

    def __init__(
        self, k: Frame, sums: Sums, rows: Expr, forms: Sequence[PlainForm], columns: int, parts: int = 1
    ) -> None:
        """rows: of x, which fix the form. columns: of the result, or of a head's. parts: weight rows of a column,
        `columns` apart."""
        self._k, self._sums, self._columns, self._parts, self._forms = k, sums, columns, parts, forms
        self._meeting, self._all_rows = Meeting(forms, parts, sums.total), rows
        self._most, self.width = self._of_form(lambda form: form.most), self._of_form(lambda form: form.width(parts))
        self._rows, self._own = self._of_form(lambda form: form.rows), self._of_form(lambda form: form.own(parts))
        self._across = self._of_form(lambda form: form.across)
        self.side_by_side = let(T.truncdiv(columns + self.width - 1, self.width))

    @contextmanager
    def each(self, side_by_side: Expr) -> Iterator[tuple[Expr, Expr]]:
        """A group's tiles: the first row, and the number among those `side_by_side`."""
        below = let(T.truncdiv(self._all_rows + self._most - 1, self._most))
        with calling(self._k).share_groups(let(below * side_by_side)) as unit:
            above = let(T.truncdiv(unit, side_by_side))
            self._row = let(above * self._most)
            self._count = let(T.min(self._all_rows - self._row, self._most))
            yield self._row, let(unit - above * side_by_side)

    def compute(self, start_of: Callable[[Expr], Expr], base: Expr, first: Expr) -> None:
        """Has the sums ready. start_of: a row's place in x. base: the first weight row. first: the first column."""
        self._start_of, self._base, self._first = start_of, base, first
        sync()  # the sums of the tile before have been read
        self._in_form(self._forms)
        sync()

    @contextmanager
    def results(self) -> Iterator[tuple[Expr, Expr, Callable[[int], Expr]]]:
        """An item's part of the results: row, column, and the sum of a part. Neighbours have neighbouring columns."""
        with some(self._k, let(self._count * self.width)) as i:
            row = let(T.truncdiv(i, self.width))
            column = let(i - row * self.width)
            with when(self._first + column < self._columns):
                yield let(self._row + row), let(self._first + column), lambda part: self._total(row, column, part)

    def _total(self, row: Expr, column: Expr, part: int) -> Expr:
        """A sum, by its place in the tile."""
        below, across = let(T.truncdiv(row, self._rows)), let(T.truncdiv(column, self._across))
        number = let((part * self._own + across) * self._rows + (row - below * self._rows))
        return self._meeting.total(number, let(below * self._across + (column - across * self._across)))

    def _of_form(self, fact: Callable[[PlainForm], int]) -> Expr:
        """The fact of the form that the rows fix."""
        found = T.int32(fact(self._forms[-1]))
        for form in self._forms[-2::-1]:
            found = T.Select(self._all_rows <= form.most, T.int32(fact(form)), found)
        return let(found)

    def _in_form(self, forms: Sequence[PlainForm]) -> None:
        """Emits the body for the number of rows."""
        if len(forms) == 1:
            self._fill(forms[0])
            return
        with T.If(self._all_rows <= forms[0].most):
            with T.Then():
                self._fill(forms[0])
            with T.Else():
                self._in_form(forms[1:])

    def _fill(self, form: PlainForm) -> None:
        item = calling(self._k).item
        chain, place = let(T.truncmod(item, CHAINS)), let(T.truncdiv(item, CHAINS))
        below, across = let(T.truncdiv(place, form.across)), let(T.truncmod(place, form.across))
        # Rows and columns that there are not stand for the last ones, which others read anyway.
        rows = [let(T.min(below * form.rows + i, self._count - 1)) for i in range(form.rows)]
        starts = [self._start_of(let(self._row + row)) for row in rows]
        own = [let(across + i * form.across) for i in range(form.own(self._parts))]
        columns = [let(T.min(self._first + column, self._columns - 1)) for column in own]
        weights = [let(self._base + part * self._columns + of) for part in range(self._parts) for of in columns]
        block = Block(self._k, self._sums, form, self._parts)
        self._meeting.put(chain, place, block.compute(chain, starts, weights), form.rows)


def linear(spec: KernelSpec) -> tirx.PrimFunc:
    p = spec.as_dict()
    n, act, of_experts = int(p["n"]), activated_dtype(p), "experts" in p
    columns, parts = (n // 2, 2) if p["gated"] else (n, 1)
    layer = _Layer(spec)
    optional = [name for name in ("bias", "residual") if p.get(name)]
    index = {"index": "i32"} if of_experts else {}
    stride = row_width(columns, act) if act else n
    with Frame(spec.symbol(), {**layer.inputs, **dict.fromkeys(optional, "f32"), **index, "out": act or "f32"}) as k:
        rows = let(k.raw("index", T.int32(0))) if of_experts else k.scalar(int(p["rows"]))
        # An expert's rows are scattered among those of x, so each has tiles of its own.
        tiles = _Tiles(k, layer.sums, rows, FORMS[:1] if of_experts else FORMS, columns, parts)
        with tiles.each(tiles.side_by_side) as (first_row, number):
            base = let(k.raw("index", 1 + first_row) * n) if of_experts else T.int32(0)
            tiles.compute(lambda row: let(row * layer.sums.x.pitch), base, let(number * tiles.width))
            with tiles.results() as (row, column, sum_of):

                def value(part: int) -> Expr:
                    weight_row = let(base + part * columns + column)
                    total = let(layer.scaled(k, sum_of(part), row, weight_row), "float32")
                    if p["bias"]:
                        total = let(total + k.raw("bias", weight_row), "float32")
                    return total

                if act:
                    k.store("out", activated(p, *(value(part) for part in range(parts))), row * stride + column)
                    if stride > columns:
                        with when(column == columns - 1):
                            k.store("out", T.float32(0.0), row * stride + columns)
                else:
                    total = value(0)
                    if p.get("residual"):
                        total = total + k.raw("residual", row * n + column)
                    k.store("out", total, row * stride + column)
    return k.function()


def head_linear(spec: KernelSpec) -> tirx.PrimFunc:
    """Each head has its own rows of x, and its own weight."""
    p = spec.as_dict()
    heads, columns, gives = int(p["heads"]), int(p["n"]), str(p["gives"])
    of_head, layer = columns // heads, _Layer(spec)
    stride = row_width(columns, gives) if gives else columns
    with Frame(spec.symbol(), {**layer.inputs, "out": gives or "f32"}) as k:
        tiles = _Tiles(k, layer.sums, k.scalar(int(p["rows"])), FORMS, of_head)
        with tiles.each(let(tiles.side_by_side * heads)) as (_, number):
            head = let(T.truncdiv(number, tiles.side_by_side))
            base, first = let(head * of_head), let((number - head * tiles.side_by_side) * tiles.width)
            tiles.compute(lambda row: let((row * heads + head) * layer.sums.x.pitch), base, first)
            with tiles.results() as (row, of, sum_of):
                column = let(base + of)
                k.store("out", sum_of(0), row * stride + column)
                if stride > columns:
                    with when(column == columns - 1):
                        k.store("out", T.float32(0.0), row * stride + columns)
    return k.function()


def expert_linear(spec: KernelSpec) -> tirx.PrimFunc:
    """Raises KernelSpecError."""
    check_index(spec)
    return linear(spec)
