"""linear and linear_quant on tensor cores: mma.sync of 16 weight rows by 8 rows of x, over ascending K.

A sum is one chain of products of 16 or 32 elements, in any tile. The weight is always the first operand. For up to 8
rows of x, a warp reads both operands from global memory. For more, a group stages a tile's steps in shared memory, with
two steps in flight. A chain is scaled into a float where a scale group ends.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.gpu.kernels.fragments import LANES, Operand, call, weight_of, x_operand
from llmc.compiler.targets.gpu.kernels.groups import Shared, calling, sync
from llmc.compiler.targets.gpu.kernels.linear import fma
from llmc.compiler.targets.gpu.tensor_cores import FEW_ROWS, ITEMS, WARP, WEIGHT_ROWS, X_ROWS, TensorLayer
from llmc.compiler.targets.reference.kernels.frame import Array, Expr, Frame, let, row_width, when
from llmc.compiler.targets.reference.kernels.linear import activated, activated_dtype
from llmc.compiler.targets.reference.kernels.matrices import matrix_of
from llmc.compiler.targets.reference.kernels.matrix import IntegerMatrix
from llmc.compiler.targets.reference.kernels.rows_int8 import Int8Rows

_STAGES = 3
_M, _N = 16, 8  # rows of the weight, and of x, per product
_HALF = 8  # distance between the two weight rows of a lane's results
_WARPS = ITEMS // WARP
_AHEAD = 4  # steps that a warp reads ahead of its products


class _Layer:
    """The layer, and this item's position in it."""

    def __init__(self, k: Frame, spec: KernelSpec, layer: TensorLayer, matrix: IntegerMatrix | None) -> None:
        p = spec.as_dict()
        self.k, self.p, self.layer, self.matrix = k, p, layer, matrix
        self.n, self.act = int(p["n"]), activated_dtype(p)
        self.parts = 2 if p["gated"] else 1
        self.columns = self.n // self.parts
        self.rows = k.scalar(int(p["rows"]))
        self.int8 = Int8Rows(layer.width, matrix.scales) if matrix is not None and layer.dtype == "i8" else None
        self.weight = weight_of(layer, matrix)
        self.x = x_operand(layer, 0 if matrix is None else matrix.scales)
        item = calling(k).item
        self.warp, within = let(T.truncdiv(item, WARP)), let(T.truncmod(item, WARP))
        self.of_row, self.lane = let(T.truncdiv(within, LANES)), let(T.truncmod(within, LANES))


class _Sums:
    """A warp's sums: `fragments` of 16 weight rows by `tiles` of 8 rows of x.

    rows: by fragment and half, the weight row of this lane's results.
    """

    def __init__(self, of: _Layer, fragments: int, tiles: int) -> None:
        self._of, self.fragments, self.tiles = of, fragments, tiles
        layer, size = of.layer, fragments * tiles * 4
        self._kind = "int32" if layer.dtype == "i8" else "float32"
        self._chain = Array(size, self._kind)
        self._total = Array(size) if layer.length else self._chain

    def begin(self, rows: list[list[Expr]], row: Expr) -> None:
        """row: the warp's first row of x."""
        self._rows, self._row = rows, row
        for i in range(self.fragments * self.tiles * 4):
            self._chain[i] = T.Cast(self._kind, T.int32(0))
            if self._total is not self._chain:
                self._total[i] = T.float32(0.0)

    def x_row(self, tile: int, odd: int = 0) -> Expr:
        """The row of x of a result of this lane."""
        return let(self._row + tile * _N + self._of.lane * 2 + odd)

    def multiply(self, step: Expr, stored: list[list[Array]], x: Callable[[int], Array]) -> None:
        """Multiplies a step. stored: a lane's part of each weight row. x: of the x row of a tile."""
        of = self._of
        words = [
            [of.weight.words(of.k, row, step, part) for row, part in zip(rows, parts, strict=True)]
            for rows, parts in zip(self._rows, stored, strict=True)
        ]
        for tile in range(self.tiles):
            b = x(tile)
            for fragment, (low, high) in enumerate(words):
                c = self._chain.address((fragment * self.tiles + tile) * 4)
                for half in (0, 2):
                    a = (low[half], high[half], low[half + 1], high[half + 1])
                    call(f"llmc_mma_{of.layer.dtype}", c, *a, b[half], b[half + 1])

    def end_step(self, step: Expr) -> None:
        layer = self._of.layer
        if layer.length and layer.length < layer.width:
            steps = layer.length // layer.step
            with when(T.truncmod(step + 1, steps) == 0):
                self._fold(let(T.truncdiv(step, steps)))

    def end(self) -> None:
        layer = self._of.layer
        if layer.length and (layer.length == layer.width or layer.width % layer.length):
            assert self._of.matrix is not None
            self._fold(T.int32(self._of.matrix.scales - 1))

    def _fold(self, group: Expr) -> None:
        of, k, matrix = self._of, self._of.k, self._of.matrix
        assert matrix is not None
        scales = [[let(matrix.scale(k, row, group), "float32") for row in rows] for rows in self._rows]
        at_group = let(group * of.layer.length)
        zeros = [
            [let(T.Cast("int32", matrix.of_group(k, "zero", row, at_group))) for row in rows]
            if of.layer.asymmetric and of.int8 is not None
            else [T.int32(1)] * 2
            for rows in self._rows
        ]
        for tile in range(self.tiles):
            sums = [self._sum_of(group, self.x_row(tile, odd)) for odd in range(2)]
            for fragment in range(self.fragments):
                for half in range(2):
                    for odd in range(2):
                        i = (fragment * self.tiles + tile) * 4 + 2 * half + odd
                        chain, scale = self._chain[i], scales[fragment][half]
                        if of.int8 is None:
                            self._total[i] = fma(chain, scale, self._total[i])
                        else:
                            whole = chain + zeros[fragment][half] * sums[odd]
                            self._total[i] = self._total[i] + T.Cast("float32", let(whole)) * scale
                        self._chain[i] = T.Cast(self._kind, T.int32(0))

    def _sum_of(self, group: Expr, row: Expr) -> Expr:
        """The stored sum of an int8 row for its group: the sum of its numbers times −zero point, or times −1."""
        of = self._of
        if of.int8 is None:
            return T.int32(0)
        within = let(T.min(row, of.rows - 1))
        return let(of.k.raw("x", within * of.int8.words + (of.int8.number_words + 1) + group))

    def value(self, fragment: int, tile: int, half: int, odd: int, row: Expr) -> Expr:
        """A finished result, with the bias."""
        of, total = self._of, self._total[(fragment * self.tiles + tile) * 4 + 2 * half + odd]
        if of.int8 is not None:
            total = total * of.int8.scale(of.k, "x", row)
        if of.p["bias"]:
            total = let(total, "float32") + of.k.raw("bias", self._rows[fragment][half])
        return let(total, "float32")


def _write(of: _Layer, sums: _Sums, columns: list[list[Expr]]) -> None:
    """Writes the sums. columns: of the result, by fragment and half; with a gate, those of the first fragment."""
    k, n, width = of.k, of.n, of.columns
    stride = row_width(width, of.act) if of.act else n
    for tile in range(sums.tiles):
        for odd in range(2):
            row = sums.x_row(tile, odd)
            for fragment in range(sums.fragments // of.parts):
                for half, column in enumerate(columns[fragment]):
                    with when(T.And(column < width, row < of.rows)):
                        value = sums.value(fragment, tile, half, odd, row)
                        if of.act:
                            up = [sums.value(1, tile, half, odd, row)] if of.parts == 2 else []
                            k.store("out", activated(of.p, value, *up), row * stride + column)
                            if stride > width:
                                with when(column == width - 1):
                                    k.store("out", T.float32(0.0), row * stride + width)
                            continue
                        if of.p.get("residual"):
                            value = value + k.raw("residual", row * n + column)
                        k.store("out", value, row * stride + column)


def _places(of: _Layer, fragments: int, first: Expr) -> tuple[list[list[Expr]], list[list[Expr]]]:
    """(result columns, weight rows) of this lane's results. first: the warp's first column."""
    columns: list[list[Expr]] = []
    rows: list[list[Expr]] = []
    for fragment in range(fragments):
        part, block = (fragment, 0) if of.parts == 2 else (0, fragment)
        columns.append([let(first + block * _M + half * _HALF + of.of_row) for half in range(2)])
        rows.append([let(T.min(column, of.columns - 1) + part * of.columns) for column in columns[-1]])
    return columns, rows


def _the_only(x: Array) -> Callable[[int], Array]:
    """The x row of a lane, if there is one tile of rows."""
    return lambda _: x


def _few(of: _Layer) -> None:
    """Few rows of x: one unit is a warp's 16 columns of all rows."""
    k, steps = of.k, of.layer.steps
    sums = _Sums(of, of.parts, 1)
    units = -(-of.columns // _M)
    groups = calling(k).num_groups
    first = let(of.warp * groups + calling(k).group)  # groups vary fastest: few units still spread over many processors
    step_units = let(groups * _WARPS)
    whole, rest = divmod(steps, _AHEAD)
    with T.serial(let(T.truncdiv(units - first + (step_units - 1), step_units))) as turn:
        columns, rows = _places(of, of.parts, let((first + turn * step_units) * _M))
        sums.begin(rows, T.int32(0))
        x_row = let(T.min(of.of_row, of.rows - 1))

        def multiply(begin: Expr, count: int) -> None:
            at = [let(begin + i) for i in range(count)]
            weights = [[[_loaded(of.weight.operand, of, row, step) for row in pair] for pair in rows] for step in at]
            xs = [_loaded(of.x, of, x_row, step) for step in at]
            for step, stored, x in zip(at, weights, xs, strict=True):
                sums.multiply(step, stored, _the_only(x))
                sums.end_step(step)

        if whole:
            with T.serial(whole) as some:
                multiply(let(some * _AHEAD), _AHEAD)
        if rest:
            multiply(T.int32(whole * _AHEAD), rest)
        sums.end()
        _write(of, sums, columns)


def _loaded(operand: Operand, of: _Layer, row: Expr, step: Expr) -> Array:
    words = Array(4, "uint32")
    operand.load(words, of.k, row, step, of.lane)
    return words


class _Staged:
    """Rows of an operand staged in shared memory, for _STAGES steps. row_of: buffer row, by staged position."""

    def __init__(self, of: _Layer, operand: Operand, count: int) -> None:
        self._of, self.operand, self._count = of, operand, count
        self.row_words = operand.step_bytes // 4
        self.memory = Shared(_STAGES * count * self.row_words, "uint32")

    def rows(self, row_of: Callable[[Expr], Expr]) -> None:
        """Sets the rows to be copied from now on."""
        self._turns = []
        item, copied = calling(self._of.k).item, self.operand.copied
        pieces = self.operand.step_bytes // copied
        for done in range(0, self._count * pieces, ITEMS):
            index = let(item + done)
            place, at = let(T.truncdiv(index, pieces)), let(T.truncmod(index, pieces) * copied)
            self._turns.append((place, at, row_of(place)))

    def copy(self, step: Expr) -> None:
        stage = let(T.truncmod(step, _STAGES) * (self._count * self.row_words))
        for place, at, row in self._turns:
            to = self.memory.address(let(stage + place * self.row_words + T.truncdiv(at, 4)))
            call(f"llmc_copy{self.operand.copied}", to, self.operand.address(self._of.k, row, step, at))

    def read(self, step: Expr, place: Expr) -> Array:
        words = Array(4, "uint32")
        stage = let((T.truncmod(step, _STAGES) * self._count + place) * self.row_words)
        self.operand.read(words, self.memory, stage, self._of.lane)
        return words


def _many(of: _Layer) -> None:
    """Many rows of x: one unit is a group's tile of 128 weight rows by 64 rows of x; each warp takes a 32 by 32
    piece."""
    k, steps, fragments = of.k, of.layer.steps, 2
    weight, x = _Staged(of, of.weight.operand, WEIGHT_ROWS), _Staged(of, of.x, X_ROWS)
    across = WEIGHT_ROWS // (fragments * _M)  # warps side by side
    x_of_warp = X_ROWS * across // _WARPS
    sums = _Sums(of, fragments, x_of_warp // _N)
    warp = let(T.truncmod(of.warp, across))
    below = let(T.truncdiv(of.warp, across) * x_of_warp)
    wide = WEIGHT_ROWS // of.parts  # columns of a tile
    tiles = -(-of.columns // wide)
    row_tiles = let(T.truncdiv(of.rows + (X_ROWS - 1), X_ROWS))
    with calling(k).share_groups(let(row_tiles * tiles)) as unit:
        row, column = let(T.truncmod(unit, row_tiles) * X_ROWS), let(T.truncdiv(unit, row_tiles) * wide)

        def weight_row(place: Expr) -> Expr:
            """Warps take neighbouring rows; with a gate, 16 of each part."""
            if of.parts == 1:
                return let(T.min(column + place, of.columns - 1))
            part, within = let(T.truncmod(T.truncdiv(place, _M), 2)), let(T.truncmod(place, _M))
            of_part = let(T.min(column + T.truncdiv(place, 2 * _M) * _M + within, of.columns - 1))
            return let(of_part + part * of.columns)

        weight.rows(weight_row)
        x.rows(lambda place: let(T.min(row + place, of.rows - 1)))
        columns, rows = _places(of, fragments, let(column + warp * (wide // across)))
        sums.begin(rows, let(row + below))

        def copy(step: Expr) -> None:
            with when(step < steps):
                weight.copy(step)
                x.copy(step)
            call("llmc_copies_end")

        sync()
        for ahead in range(_STAGES - 1):
            copy(let(T.int32(ahead)))
        with T.serial(steps) as step:
            call("llmc_copies_wait1")
            sync()
            copy(let(step + (_STAGES - 1)))
            stored = [
                [
                    weight.read(step, let(warp * (fragments * _M) + (fragment * _M + half * _HALF) + of.of_row))
                    for half in range(2)
                ]
                for fragment in range(fragments)
            ]
            sums.multiply(step, stored, lambda tile: x.read(step, let(below + of.of_row + tile * _N)))
            sums.end_step(step)
        call("llmc_copies_wait0")
        sums.end()
        _write(of, sums, columns)


def tensor_linear(spec: KernelSpec, layer: TensorLayer) -> tirx.PrimFunc:
    """layer: from `tensor_layer`."""
    p = spec.as_dict()
    matrix = None
    inputs = {"x": layer.dtype, "weight": layer.dtype}
    if layer.length:
        found = matrix_of(p, layer.width)
        assert isinstance(found, IntegerMatrix)
        matrix, inputs = found, {"x": layer.dtype, **found.operands()}
    optional = [name for name in ("bias", "residual") if p.get(name)]
    with Frame(spec.symbol(), {**inputs, **dict.fromkeys(optional, "f32"), "out": activated_dtype(p) or "f32"}) as k:
        of = _Layer(k, spec, layer, matrix)
        with T.If(of.rows <= FEW_ROWS):
            with T.Then():
                _few(of)
            with T.Else():
                _many(of)
    return k.function()
