"""linear and linear_quant: an item computes a column of up to 16 rows. It reads its own weight row, many bytes at a
time; x is staged in shared memory.

Each sum is one chain over ascending K, independent of tile and other rows: fma for floats, exact for integers. Integers
that fit a byte are multiplied by fours, as words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.gpu.kernels.groups import Shared, calling, some, sync, turns, unrolled
from llmc.compiler.targets.gpu.kernels.weight_reads import FloatReads, NumberReads, WeightReads, WordReads
from llmc.compiler.targets.gpu.launch import ITEMS, LINEAR_ROWS
from llmc.compiler.targets.reference.kernels.experts import check_index
from llmc.compiler.targets.reference.kernels.frame import Array, Expr, Frame, let, row_width, when
from llmc.compiler.targets.reference.kernels.linear import activated, activated_dtype
from llmc.compiler.targets.reference.kernels.matrices import matrix_of
from llmc.compiler.targets.reference.kernels.matrix import IntegerMatrix
from llmc.compiler.targets.reference.kernels.rows_int8 import Int8Rows

_STAGED = 2048
"""Elements of x in shared memory, of all rows."""
_FORMS = {1: 4, 8: 2, LINEAR_ROWS: 1}
"""How tiles of up to so many rows are computed: the most reads of a weight row that an item waits for at a time."""

Element = Callable[[Frame, Expr, Expr], Expr]
"""An element of a row of x or of the weight, as it is multiplied."""


def fma(a: Expr, b: Expr, c: Expr) -> Expr:
    return T.call_pure_extern("float32", "fma", a, b, c)


class _Floats:
    """Float sums of an item, by row."""

    dtype = "float32"

    def __init__(self, num_rows: int) -> None:
        self.num_rows, self.total = num_rows, Array(num_rows)

    def reset(self) -> None:
        with unrolled(self.num_rows) as row:
            self.total[row] = T.float32(0.0)

    def add(self, row: Expr, x: Expr, weight: Expr) -> None:
        self.total[row] = fma(x, weight, self.total[row])


class _Integers(_Floats):
    """Exact integer sums, converted and scaled where a scale ends."""

    dtype = "int32"

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows)
        self._exact = Array(num_rows, "int32")

    def reset(self) -> None:
        super().reset()
        with unrolled(self.num_rows) as row:
            self._exact[row] = T.int32(0)

    def add(self, row: Expr, x: Expr, weight: Expr) -> None:
        self._exact[row] = self._exact[row] + x * weight

    def fold(self, scale: Expr) -> None:
        with unrolled(self.num_rows) as row:
            self.total[row] = self.total[row] + T.Cast("float32", self._exact[row]) * scale
            self._exact[row] = T.int32(0)


class _Words(_Integers):
    """Sums of words of four numbers."""

    def add(self, row: Expr, x: Expr, weight: Expr) -> None:
        self._exact[row] = self._exact[row] + T.call_pure_extern("int32", "llmc_dot4", x, weight)


class _Problem:
    """The operands of a linear layer.

    kind: of sums. x: an element of a row as it is multiplied, or a word of four. width: their number in a row. length:
    those of a scale for integer sums, else 0. reads: of the weight's rows.
    """

    def __init__(self, spec: KernelSpec) -> None:
        p = spec.as_dict()
        self.width, act = int(p["k"]), str(p["act_dtype"])
        self.length, stride = 0, row_width(self.width, act) if act != "i8" else 0
        self.kind: type[_Floats] = _Floats
        self.x: Element = lambda k, row, i: k.load("x", row * stride + i)
        if not spec.op.endswith("_quant"):
            self.inputs = {"x": act, "weight": str(p["weight_dtype"])}
            self.reads: WeightReads = FloatReads(str(p["weight_dtype"]), self.width)
            return
        self.matrix = matrix = matrix_of(p, self.width)
        self.inputs = {"x": act, **matrix.operands()}
        if act != "i8":
            self.reads = NumberReads(matrix, matrix.value, "float32", matrix.group_size)
            return
        assert isinstance(matrix, IntegerMatrix)
        self.rows = rows = Int8Rows(self.width, matrix.scales)
        self.kind = _Integers
        self.x = lambda k, row, i: rows.number(k, "x", row, i)
        self.length = self.width if matrix.scales == 1 else matrix.group_size
        if matrix.fits_bytes and self.width % 4 == 0 and self.length % 4 == 0:
            self.kind, self.reads = _Words, WordReads(matrix, self.length)
            self.x = lambda k, row, word: rows.word(k, "x", row, word)
            self.width, self.length = self.width // 4, self.length // 4
            return
        self.reads = NumberReads(matrix, matrix.whole, "int32", self.length)

    def reads_ahead(self, most: int) -> int:
        """Reads of a turn: they divide a row."""
        return next(ahead for ahead in (4, 2, 1) if ahead <= most and self.width % (ahead * self.reads.count) == 0)


class _Tile:
    """The sums of one item: one column (of each part) by several rows."""

    def __init__(self, k: Frame, problem: _Problem, parts: int, columns: int, num_rows: int) -> None:
        self._k, self._problem, self._parts, self._columns, self._num_rows = k, problem, parts, columns, num_rows
        self._xs = Shared(_STAGED, problem.kind.dtype)
        self._sums = [problem.kind(num_rows) for _ in range(parts)]
        self._forms = [rows for rows in _FORMS if rows <= num_rows]

    def compute(self, row: Expr, rows: Expr, column: Expr, base: Expr) -> None:
        """row: first of the tile. rows: number of rows of x. column: of the item. base: first weight row, for an
        expert."""
        problem, width = self._problem, self._problem.width
        own = let(T.min(column, self._columns - 1) + base)
        self._weight_rows = [let(own + part * self._columns) for part in range(self._parts)]
        self._row, self._count = row, let(T.min(rows - row, self._num_rows))
        for sums in self._sums:
            sums.reset()
        staged = self._of_form([T.int32(self._staged(most)) for most in self._forms])
        with turns(self._k, T.truncdiv(width + (staged - 1), staged)) as turn:
            first = let(turn * staged)
            end = let(T.min(first + staged, width))
            self._stage(first, end, staged)
            self._in_form([partial(self._multiply, first, end, most) for most in self._forms])
        length = problem.length
        if length and (length == width or width % length):
            self._fold(T.int32(problem.matrix.scales - 1))

    def _staged(self, most: int) -> int:
        """Elements of each of up to `most` rows that are staged at a time: whole turns of `_multiply`."""
        turn = self._problem.reads_ahead(_FORMS[most]) * self._problem.reads.count
        return _STAGED // most // turn * turn

    def _of_form(self, values: list[Expr]) -> Expr:
        """The value for the number of rows that the tile has."""
        found = values[-1]
        for most, value in zip(self._forms[-2::-1], values[-2::-1], strict=True):
            found = T.Select(self._count <= most, value, found)
        return let(found)

    def _in_form(self, bodies: Sequence[Callable[[], None]]) -> None:
        """Emits the body for the number of rows that the tile has."""
        if len(bodies) == 1:
            bodies[0]()
            return
        forms = self._forms[-len(bodies) :]
        with T.If(self._count <= forms[0]):
            with T.Then():
                bodies[0]()
            with T.Else():
                self._in_form(bodies[1:])

    def _stage(self, first: Expr, end: Expr, staged: Expr) -> None:
        k, count = self._k, let(end - first)
        sync()
        with T.serial(self._count) as of:
            row = let(self._row + of)
            with some(k, count) as element:
                self._xs[of * staged + element] = self._problem.x(k, row, let(first + element))
        sync()

    def _multiply(self, first: Expr, end: Expr, most: int) -> None:
        """Adds the products of elements from `first` to `end` to the sums of up to `most` rows."""
        k, problem, reads, staged = self._k, self._problem, self._problem.reads, self._staged(most)
        ahead, dtype, length = problem.reads_ahead(_FORMS[most]), problem.kind.dtype, problem.length
        step = ahead * reads.count
        with T.serial(let(T.truncdiv(end - first, step))) as turn:
            within = let(turn * step)
            places = [let(first + within + i * reads.count) for i in range(ahead)]
            found = [[reads.read(k, row, place) for row in self._weight_rows] for place in places]
            for i, (place, of_parts) in enumerate(zip(places, found, strict=True)):
                with unrolled(reads.count) as element:
                    weights = [reads.element(k, one, element) for one in of_parts]
                    at = let(within + i * reads.count + element)
                    with unrolled(most) as row:
                        x = let(self._xs[at + row * staged], dtype)
                        for sums, weight in zip(self._sums, weights, strict=True):
                            sums.add(row, x, weight)
                if length and length < problem.width:
                    after = let(place + reads.count)
                    with when(T.truncmod(after, length) == 0):
                        self._fold(T.truncdiv(after, length) - 1)

    def _fold(self, group: Expr) -> None:
        k, of = self._k, let(group)
        for row, sums in zip(self._weight_rows, self._sums, strict=True):
            scale = let(self._problem.matrix.scale(k, row, of), "float32")
            assert isinstance(sums, _Integers)
            sums.fold(scale)

    def value(self, part: int, of: Expr, row: Expr) -> Expr:
        """The sum of tile row `of`, which is row `row` of x."""
        total = self._sums[part].total[of]
        if self._problem.length:
            total = total * self._problem.rows.scale(self._k, "x", row)
        return let(total, "float32")


def linear(spec: KernelSpec) -> tirx.PrimFunc:
    p = spec.as_dict()
    n, act, of_experts = int(p["n"]), activated_dtype(p), "experts" in p
    columns, parts = (n // 2, 2) if p["gated"] else (n, 1)
    # An expert's rows are scattered among those of x.
    num_rows = 1 if of_experts else LINEAR_ROWS
    problem = _Problem(spec)
    optional = [name for name in ("bias", "residual") if p.get(name)]
    index = {"index": "i32"} if of_experts else {}
    stride = row_width(columns, act) if act else n
    tiles = -(-columns // ITEMS)
    with Frame(spec.symbol(), {**problem.inputs, **dict.fromkeys(optional, "f32"), **index, "out": act or "f32"}) as k:
        rows = let(k.raw("index", T.int32(0))) if of_experts else k.scalar(int(p["rows"]))
        tile = _Tile(k, problem, parts, columns, num_rows)
        row_tiles = let(T.truncdiv(rows + (num_rows - 1), num_rows))
        with calling(k).share_groups(let(row_tiles * tiles)) as unit:
            row = let(T.truncdiv(unit, tiles) * num_rows)
            first = let(T.truncmod(unit, tiles) * ITEMS)
            base = let(k.raw("index", 1 + row) * n) if of_experts else T.int32(0)
            column = let(first + calling(k).item)
            tile.compute(row, rows, column, base)

            def value(part: int, of: Expr, at: Expr) -> Expr:
                total = tile.value(part, of, at)
                if p["bias"]:
                    total = let(total + k.raw("bias", base + part * columns + column), "float32")
                return total

            with unrolled(num_rows) as of:
                at = let(row + of)
                with when(T.And(column < columns, at < rows)):
                    if act:
                        k.store("out", activated(p, *(value(i, of, at) for i in range(parts))), at * stride + column)
                        if stride > columns:
                            with when(column == columns - 1):
                                k.store("out", T.float32(0.0), at * stride + columns)
                    else:
                        total = value(0, of, at)
                        if p.get("residual"):
                            total = total + k.raw("residual", at * n + column)
                        k.store("out", total, at * stride + column)
    return k.function()


def expert_linear(spec: KernelSpec) -> tirx.PrimFunc:
    """Raises KernelSpecError."""
    check_index(spec)
    return linear(spec)
