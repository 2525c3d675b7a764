"""Key and value pools: block, KV head, position in the block, element. One-byte numbers are followed by a scale per
position."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as T

from llmc.compiler.dtypes import FLOATS
from llmc.compiler.kernel_spec import KernelSpecError
from llmc.compiler.targets.reference.kernels.frame import Array, Cell, Expr, Frame, is_nan, let, when, widened
from llmc.compiler.targets.reference.kernels.functions import nearest
from llmc.compiler.targets.reference.kernels.padding import VALUES
from llmc.kv_dtypes import KV_DTYPES, SCALE_BYTES

_SMALLEST = 1e-30  # smaller magnitudes count as zero; the largest number of a dtype divided by this is finite
_FLOATS = {"fp8_e4m3": (3, 7), "fp8_e5m2": (2, 15)}
"""(mantissa bits, exponent bias)."""


class Pool:
    """One of the two pools. width: elements per position, padding included. scales: per position, for parts of it."""

    def __init__(
        self, name: str, dtype: str, kv_heads: int, head_dim: int, block: int, width: int, scales: int = 1
    ) -> None:
        if dtype not in KV_DTYPES:
            raise KernelSpecError(f"kv_dtype {dtype!r} is not one of {', '.join(KV_DTYPES)}")
        self.name, self.dtype, self.largest = name, dtype, KV_DTYPES[dtype].largest
        self._kv_heads, self._head_dim, self.block_size, self.width = kv_heads, head_dim, block, width
        self._part = block * width + (0 if self.largest is None else scales * block * SCALE_BYTES)

    @property
    def buffer_dtype(self) -> str:
        """The dtype of the pool in a `Frame`."""
        return self.dtype if self.largest is None else "u8"

    def _part_of(self, kv_block: Expr, head: Expr) -> Expr:
        return let((kv_block * self._kv_heads + head) * self._part)

    @property
    def item_bytes(self) -> int:
        return 1 if self.largest is not None else 4 // FLOATS[self.dtype].per_word

    def aligned(self, nbytes: int) -> bool:
        """Whether every position begins at a multiple of `nbytes` bytes."""
        return all(size * self.item_bytes % nbytes == 0 for size in (self.width, self._part))

    def row(self, kv_block: Expr, head: Expr, offset: Expr) -> Expr:
        """Index of the first element of a position."""
        return let(self._part_of(kv_block, head) + offset * self.width)

    def _scale_at(self, kv_block: Expr, head: Expr, offset: Expr, part: int) -> Expr:
        scales = self._part_of(kv_block, head) + self.block_size * (self.width + part * SCALE_BYTES)
        return let(scales + offset * SCALE_BYTES)

    def number(self, k: Frame, index: Expr) -> Expr:
        """An element before scaling."""
        return self.decoded(k.raw(self.name, index))

    def decoded(self, stored: Expr) -> Expr:
        """An element before scaling, as float32."""
        if self.largest is None:
            return widened(self.dtype, stored)
        byte = let(T.Cast("int32", stored))
        if self.dtype == "int8":
            return T.Cast("float32", byte - 128)
        if self.dtype == "fp8_e5m2":
            return widened("f16", T.shift_left(byte, T.int32(8)))
        magnitude = T.reinterpret("float32", T.shift_left(T.bitwise_and(byte, T.int32(0x7F)), T.int32(20)))
        value = let(magnitude * T.float32(2.0**120), "float32")
        return T.Select(byte >= 128, -value, value)

    def scale(self, k: Frame, kv_block: Expr, head: Expr, offset: Expr, part: int = 0) -> Expr:
        """The scale of the numbers of a position's part."""
        if self.largest is None:
            return T.float32(1.0)
        at, bits = self._scale_at(kv_block, head, offset, part), T.int32(0)
        for byte in range(SCALE_BYTES):
            bits = T.bitwise_or(bits, T.shift_left(T.Cast("int32", k.raw(self.name, at + byte)), T.int32(8 * byte)))
        return let(T.reinterpret("float32", let(bits)), "float32")

    def write(
        self,
        k: Frame,
        kv_block: Expr,
        head: Expr,
        offset: Expr,
        value: Callable[[Expr], Expr],
        stated: Expr | None,
        part: int = 0,
        elements: tuple[int, int] | None = None,
    ) -> None:
        """Writes the elements of a position's part. stated: its scale; None: largest magnitude divided by the largest
        number. elements: (first, number) of the part; None: all."""
        first, count = elements or (0, self._head_dim)
        row = self.row(kv_block, head, offset) + first
        if self.largest is None:
            with T.serial(count) as i:
                k.store(self.name, value(i), row + i)
            return
        widest, values = Cell(T.float32(0.0)), Array(count)
        with T.serial(count) as i:
            values[i] = value(i)
            magnitude = let(T.abs(values[i]), "float32")
            with when(T.Or(magnitude > widest.get(), is_nan(magnitude))):
                widest.set(magnitude)
        inverse = self.inverse(widest.get())
        with T.serial(count) as i:
            self.put(k, row + i, values[i], inverse, stated)
        self.put_scale(k, kv_block, head, offset, widest.get(), stated, part)

    def inverse(self, widest: Expr) -> Expr:
        """What numbers of a part are multiplied by, whose largest magnitude is `widest`."""
        return let(T.float32(self.largest) / T.max(widest, T.float32(_SMALLEST)), "float32")

    def put(self, k: Frame, at: Expr, value: Expr, inverse: Expr, stated: Expr | None) -> None:
        """Writes a number as one byte. inverse, stated: as `inverse` gives it, and as for `write`."""
        number = let(value * inverse if stated is None else value / stated, "float32")
        k.put_raw(self.name, T.Cast("uint8", self._stored(number)), at)

    def put_scale(
        self, k: Frame, kv_block: Expr, head: Expr, offset: Expr, widest: Expr, stated: Expr | None, part: int = 0
    ) -> None:
        """Writes the scale of a position's part, whose largest magnitude is `widest`."""
        scale = widest / T.float32(self.largest)
        if stated is not None:
            # Infinity and NaN are conveyed by the scale alone.
            infinite = let(T.reinterpret("int32", widest)) >= T.int32(0x7F800000)
            scale = T.Select(infinite, widest * T.float32(0.0), stated)
        bits, at = let(T.reinterpret("int32", let(scale, "float32"))), self._scale_at(kv_block, head, offset, part)
        for byte in range(SCALE_BYTES):
            taken = T.bitwise_and(T.shift_right(bits, T.int32(8 * byte)), T.int32(255))
            k.put_raw(self.name, T.Cast("uint8", taken), at + byte)

    def _stored(self, number: Expr) -> Expr:
        """The byte of a number, rounded to nearest, ties to even, saturating."""
        largest = float(self.largest or 0)
        if self.dtype == "int8":
            whole = nearest(T.max(T.min(number, T.float32(largest)), T.float32(-largest)))
            return let(T.Cast("int32", T.Select(is_nan(whole), T.float32(0.0), whole))) + 128
        mantissa, bias = _FLOATS[self.dtype]
        shift, normal = 23 - mantissa, 2.0 ** (1 - bias)
        bits = let(T.reinterpret("int32", number))
        given = let(T.bitwise_and(bits, T.int32(0x7FFFFFFF)))
        most = let(T.reinterpret("int32", T.float32(largest)))
        magnitude = let(T.min(given, most))
        odd = T.bitwise_and(T.shift_right(magnitude, T.int32(shift)), T.int32(1))
        half = T.int32((1 << (shift - 1)) - 1)
        rounded = T.shift_right(magnitude + (odd + half), T.int32(shift)) - T.int32((127 - bias) << mantissa)
        # Below `normal` all floats are multiples of one unit; adding this constant rounds to such multiples.
        rounder = T.float32(normal / 2.0**mantissa * 2.0**23)
        low = T.reinterpret("int32", T.reinterpret("float32", magnitude) + rounder) - T.reinterpret("int32", rounder)
        small = T.reinterpret("float32", magnitude) < T.float32(normal)
        sign = T.bitwise_and(T.shift_right(bits, T.int32(24)), T.int32(0x80))
        return T.bitwise_or(let(T.Select(small, low, rounded)), sign)


def key_pool(dtype: str, kv_heads: int, head_dim: int, block: int, scales: int = 1) -> Pool:
    return Pool("k_pool", dtype, kv_heads, head_dim, block, head_dim, scales)


def value_pool(dtype: str, kv_heads: int, head_dim: int, block: int) -> Pool:
    return Pool("v_pool", dtype, kv_heads, head_dim, block, -(-head_dim // VALUES) * VALUES)
