"""quantize_rows: rounds float activations to packed int8 with one scale per row. Other kernels reuse it for their
output.

A row's scale is its largest magnitude / 127; numbers are value · (127 / largest), rounded to nearest even. A row tile
holds words of 4 numbers, scales, and sums by the groups of the weight that reads them (FORMAT.md). Infinity and NaN are
conveyed by the scale alone.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec, KernelSpecError
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.ir import int8, vector
from llmc.compiler.targets.cpu.target import Target

_LINE = 8  # K is padded to a multiple of this
_TILE = b.WIDTH // 2  # rows of tiles processed in their packed order
SMALLEST = 1e-36  # smaller magnitudes count as zero; 127 divided by this is finite


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    return ("x", "out")


class RowQuantizer:
    """Quantizes rows of `dim` floats, one at a time: keep every vector of the row, then write.

    The spec's group_size and sum_factor come from the weight that reads the rows (see WeightFormat).
    """

    def __init__(self, dim: int, spec: KernelSpec) -> None:
        p = spec.as_dict()
        self.dim, self.row_tile = dim, int(p["row_tile"])
        group_size, self.sum_factor = int(p["group_size"]), int(p["sum_factor"])
        self.groups = 1 if group_size < 0 else b.ceil_div(dim, group_size)
        self.group = b.ceil_div(dim, b.WIDTH) if self.groups == 1 else group_size // b.WIDTH
        if self.groups > 1 and group_size % b.WIDTH:
            raise KernelSpecError(f"groups of {group_size} are not whole vectors")
        self.words = b.ceil_div(dim, _LINE) * 2
        self.full, self.tail = dim // b.WIDTH, dim % b.WIDTH

    def helpers(self) -> str:
        """IR text of the helpers that this uses."""
        return int8.rounding_helpers(((self.row_tile, 4), (self.row_tile, self._words_of(self.full))))

    def _words_of(self, vector: int) -> int:
        return max(1, min(4, self.words - vector * 4))

    def begin(self) -> None:
        """Starts a row."""
        vectors = self.full + (1 if self.tail else 0)
        self._values = T.alloc_buffer((vectors * b.WIDTH,), "float32", scope="local")
        self._largest = b.Vectors(1, "int32")
        self._largest[0] = T.broadcast(T.int32(0), b.WIDTH)

    def keep(self, value: b.Expr, index: b.Expr) -> None:
        """Takes elements [index, index + 16) of the row; lanes past its end must be 0."""
        b.store(self._values, value, T.ramp(index, 1, b.WIDTH))
        # Magnitudes compare like their bits, and NaN is the largest.
        bits = T.reinterpret("int32x16", self._values[T.ramp(index, 1, b.WIDTH)])
        magnitude = T.bitwise_and(bits, T.broadcast(T.int32(0x7FFFFFFF), b.WIDTH))
        self._largest[0] = T.max(self._largest[0], magnitude)

    def write(self, out: b.Expr, row: b.Expr) -> None:
        """Writes the row to the packed activation `out`."""
        tile = self.row_tile
        base = b.let(T.truncdiv(row, tile) * ((self.words + 1 + self.groups) * tile) + T.truncmod(row, tile))
        bits = b.let(T.call_extern("int32", "llmc_lanes_max", self._largest[0]))
        largest, inverse = b.Vectors(1), b.Vectors(1)
        largest[0] = T.broadcast(T.reinterpret("float32", bits), b.WIDTH)
        inverse[0] = b.call("div", b.splat(127.0), b.call("max", largest[0], b.splat(SMALLEST)))
        scale = b.Vectors(1)
        scale[0] = b.call("div", largest[0], b.splat(127.0))
        b.store(out, T.reinterpret("int32", scale.lane(0)), base + self.words * tile)

        total = b.Vectors(1, "int32")

        def vector(index: b.Expr, words: int) -> None:
            values = b.load_vector(self._values, index * b.WIDTH)
            number = b.Vectors(1, "int32")
            number[0] = T.call_extern("int32x16", "llmc_rounded", values, inverse[0])
            total[0] = total[0] + number[0]
            b.do(int8.put_name(tile, words), number[0], b.at(out, base + index * (4 * tile)))

        with T.serial(self.groups) as group:
            total[0] = T.broadcast(T.int32(0), b.WIDTH)
            first = b.let(group * self.group)
            with T.serial(first, b.let(T.min(first + self.group, self.full))) as index:
                vector(index, 4)
            if self.tail:
                with b.when(group == self.groups - 1):
                    vector(b.let(T.int32(self.full)), self._words_of(self.full))
            at = base + (self.words + 1) * tile + group * tile
            b.store(out, T.call_extern("int32", "llmc_lanes_sum", total[0]) * self.sum_factor, at)


def build(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    return _kernel(spec, target, "")


def part(spec: KernelSpec, target: Target, symbol: str) -> tirx.PrimFunc:
    """The kernel as a named function, which another kernel calls for a range of tasks (`builder.Kernel`)."""
    return _kernel(spec, target, symbol)


def _kernel(spec: KernelSpec, target: Target, part: str) -> tirx.PrimFunc:
    p = spec.as_dict()
    whole = int(p["dim"]) % _LINE == 0
    return (_row_tiles if int(p["row_tile"]) == _TILE and whole else _single_rows)(spec, target, part)


def _row_tiles(spec: KernelSpec, target: Target, part: str) -> tirx.PrimFunc:
    """Quantizes row tiles in packed order: rows in the lanes of a vector, two words of each at a time.

    The arithmetic is that of `RowQuantizer`. Rows past the last one are undefined.
    """
    p = spec.as_dict()
    dim, act = int(p["dim"]), str(p["act_dtype"])
    quantizer = RowQuantizer(dim, spec)
    lanes, groups, sum_factor = b.lanes_of(act), quantizer.groups, quantizer.sum_factor
    words, tile_words = dim // lanes, (quantizer.words + 1 + groups) * _TILE
    steps = dim // 4
    group_steps = steps if groups == 1 else int(p["group_size"]) // 4
    helpers = vector.helpers(target.mcpu) + int8.tile_rounding_helpers()
    buffers = [("x", b.word_dtype(act)), ("out", "int32")]
    kernel = b.Kernel(part or spec.symbol(), buffers, helpers, ranged=bool(part))
    with kernel as k:
        x, out = k["x"], k["out"]
        tiles = b.let(T.truncdiv(k.scalar(int(p["rows"])) + (_TILE - 1), _TILE))
        with k.share(tiles) as tile:
            x0, out0 = b.let(tile * (words * _TILE)), b.let(tile * tile_words)

            def elements(step: b.Expr) -> tuple[b.Expr, b.Expr]:
                """Four elements of every row as float32 bits: (even ones, odd ones)."""
                read = b.Vectors(2, "int32")
                if lanes == 2:
                    read[0] = x[T.ramp(x0 + step * b.WIDTH, 1, b.WIDTH)]
                    low, high = (b.halves_of(act, read[0], half) for half in range(2))
                    return T.reinterpret("int32x16", low), T.reinterpret("int32x16", high)
                for i in range(2):
                    floats = x[T.ramp(x0 + (step * 2 + i) * b.WIDTH, 1, b.WIDTH)]
                    read[i] = T.reinterpret("int32x16", floats)
                even, odd = (T.call_extern("int32x16", f"llmc_join_{n}", read[0], read[1]) for n in ("even", "odd"))
                return even, odd

            # Magnitudes compare like their bits, and NaN is the largest.
            largest = b.Vectors(1, "int32")
            largest[0] = T.broadcast(T.int32(0), b.WIDTH)
            with T.serial(steps) as step:
                for bits in elements(b.let(step)):
                    largest[0] = T.max(largest[0], T.bitwise_and(bits, T.broadcast(T.int32(0x7FFFFFFF), b.WIDTH)))
            largest[0] = T.call_extern("int32x16", "llmc_rows_max", largest[0])
            of_rows = T.reinterpret("float32x16", largest[0])
            inverse, scale, total = b.Vectors(1), b.Vectors(1), b.Vectors(1, "int32")
            inverse[0] = b.call("div", b.splat(127.0), b.call("max", of_rows, b.splat(SMALLEST)))
            scale[0] = b.call("div", of_rows, b.splat(127.0))
            scale_bits = T.reinterpret("int32x16", scale[0])
            b.do("store_rows", scale_bits, b.at(out, out0 + quantizer.words * _TILE))
            with T.serial(groups) as group:
                total[0] = T.broadcast(T.int32(0), b.WIDTH)
                first = b.let(group * group_steps)
                with T.serial(first, b.let(T.min(first + group_steps, steps))) as step:
                    numbers = b.Vectors(2, "int32")
                    for i, bits in enumerate(elements(b.let(step))):
                        value = T.reinterpret("float32x16", bits)
                        numbers[i] = T.call_extern("int32x16", "llmc_rounded", value, inverse[0])
                        total[0] = total[0] + numbers[i]
                    b.do("put_rows", numbers[0], numbers[1], b.at(out, out0 + step * _TILE))
                total[0] = T.call_extern("int32x16", "llmc_rows_sum", total[0])
                sums = total[0] * T.broadcast(T.int32(sum_factor), b.WIDTH)
                b.do("store_rows", sums, b.at(out, out0 + (quantizer.words + 1 + group) * _TILE))
    return kernel.function()


def _single_rows(spec: KernelSpec, target: Target, part: str) -> tirx.PrimFunc:
    p = spec.as_dict()
    dim, row_tile, act = int(p["dim"]), int(p["row_tile"]), str(p["act_dtype"])
    lanes, rows = b.lanes_of(act), RowQuantizer(dim, spec)
    words = b.ceil_div(dim, lanes)
    helpers = vector.helpers(target.mcpu) + rows.helpers()
    buffers = [("x", b.word_dtype(act)), ("out", "int32")]
    kernel = b.Kernel(part or spec.symbol(), buffers, helpers, ranged=bool(part))
    with kernel as k:
        x, out = k["x"], k["out"]
        with k.share(k.scalar(int(p["rows"]))) as row:
            base = b.let(b.packed_position(row, row_tile, words))
            rows.begin()
            piece = T.alloc_buffer((b.WIDTH,), "float32", scope="local")

            def read(index: b.Expr, count: int) -> None:
                """Reads `count` elements from `index` on, from words row_tile apart."""
                for i in range(b.WIDTH):
                    if i >= count:
                        b.store(piece, T.float32(0), i)
                        continue
                    word = x[base + (T.truncdiv(index, lanes) + i // lanes) * row_tile]
                    if lanes == 2:
                        word = b.half_of(act, word, i % 2)
                    b.store(piece, word, i)
                rows.keep(b.load_vector(piece, 0), index)

            with T.serial(rows.full) as step:
                read(b.let(step * b.WIDTH), b.WIDTH)
            if rows.tail:
                read(b.let(T.int32(rows.full * b.WIDTH)), rows.tail)
            rows.write(out, row)
    return kernel.function()
