"""Packs quantized weights and activations into the layouts of FORMAT.md, with numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.targets.cpu.packing import num_panels, panel_rows
from llmc.quantize.formats.base import Quantized, Sums, WeightFormat

LINE = 8
"""Elements of K stored together: two words of 8-bit numbers, one word of 4-bit numbers. K is padded to a multiple."""
SHARING_LINES = {5: 4, 6: 2}
"""By bits of a number, the lines that share one more word, stored after theirs. K is padded to a multiple of such
sets."""


def packed_words(k: int, bits: int) -> int:
    """The number of 4-byte words in one column."""
    lines = -(-k // LINE)
    if sharing := SHARING_LINES.get(bits):
        return -(-lines // sharing) * (sharing + 1)
    return lines * bits // 4


# Pairs of bytes of a line (two words) that go to the same bits of the two halves of a word.
_EVEN, _ODD, _TOP, _LOW = (np.uint32(mask) for mask in (0x001F001F, 0x1F001F00, 0x10001000, 0x0F000F00))
_EVEN_SIX, _ODD_SIX, _TOP_SIX, _LOW_SIX = (np.uint32(m) for m in (0x003F003F, 0x3F003F00, 0x3C003C00, 0x03000300))


def _packed_sharing(bits: int, words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Packs [columns, words of 8 bits] into [columns, words of 5 or 6 bits], in whole sets of lines.

    A half of a line's word has numbers, and the top bits of its last one. The rest is in a word after those of the
    lines: of 5 bits three numbers and one bit, of 6 bits two and four.
    """
    first, second, lines = words[:, 0::2], words[:, 1::2], SHARING_LINES[bits]
    if bits == 5:
        own = first & _EVEN | (first & _ODD) >> 3 | (second & _EVEN) << 10 | (second & _TOP) << 3
        rest = (second & _LOW) >> 8
    else:
        own = first & _EVEN_SIX | (first & _ODD_SIX) >> 2 | (second & _TOP_SIX) << 2
        rest = second & _EVEN_SIX | (second & _LOW_SIX) >> 2
    found = np.empty((len(words), words.shape[1] // (2 * lines), lines + 1), np.uint32)
    shape = (*found.shape[:2], lines)
    found[..., :lines] = own.reshape(shape)
    np.bitwise_or.reduce(rest.reshape(shape) << _places(lines), axis=-1, out=found[..., lines])
    return found.reshape(len(words), -1)


def _unpacked_sharing(bits: int, words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The inverse of `_packed_sharing`."""
    lines = SHARING_LINES[bits]
    sets = words.reshape(len(words), -1, lines + 1)
    own, rest = sets[..., :lines], sets[..., lines:] >> _places(lines)
    if bits == 5:
        first = own & _EVEN | own << 3 & _ODD
        second = own >> 10 & _EVEN | own >> 3 & _TOP | rest << 8 & _LOW
    else:
        first = own & _EVEN_SIX | own << 2 & _ODD_SIX
        second = rest & _EVEN_SIX | own >> 2 & _TOP_SIX | rest << 2 & _LOW_SIX
    return np.stack((first, second), axis=-1).reshape(len(words), -1)


def _places(lines: int) -> NDArray[np.uint32]:
    """Where the bits of each line of a set begin in both halves of the word that they share."""
    return np.arange(0, 16, 16 // lines, dtype=np.uint32)


@dataclass(frozen=True)
class QuantShapes:
    """Packed shapes of a weight [N, K]: its uint8 numbers, and the planes of its format by name."""

    numbers: tuple[int, int, int, int]
    planes: dict[str, tuple[int, int, int]]

    @classmethod
    def of(cls, n: int, k: int, panel_columns: int, format: WeightFormat, parts: int = 1) -> QuantShapes:
        panels = num_panels(n, panel_columns, parts)
        numbers = (panels, packed_words(k, format.bits), panel_columns, 4)
        return cls(numbers, {plane.name: (panels, plane.count, panel_columns) for plane in format.planes(k)})


ReadQuantized = Callable[[int, Quantized], None]
"""Writes rows [first, first + len(out.numbers)) of a weight."""


class QuantPanelPacker:
    """Packs a quantized weight a few panels at a time, through scratch memory. Not thread-safe.

    read_rows: reads the [N, K] weight. parts: as in PanelPacker.
    """

    def __init__(
        self, n: int, k: int, panel_columns: int, format: WeightFormat, read_rows: ReadQuantized, parts: int = 1
    ) -> None:
        self._n, self._columns, self._format, self._read_rows = n, panel_columns, format, read_rows
        self._parts = parts
        # Zeros: elements that no row writes are padding.
        unit = LINE * SHARING_LINES.get(format.bits, 1)
        self._numbers = np.zeros((panel_columns, -(-k // unit) * unit), np.uint8)
        planes = Quantized.empty(format, panel_columns, k).planes
        self._rows = Quantized(format, self._numbers[:, :k], planes)

    def pack(self, first_panel: int, numbers: NDArray[np.uint32], planes: Mapping[str, NDArray[Any]]) -> None:
        """Packs panels from `first_panel` on. numbers: words [count, words, C]. planes: [count, elements per row,
        C]."""
        for i in range(len(numbers)):
            of_panel = panel_rows(first_panel + i, self._n, self._columns, self._parts)
            rows = len(of_panel)
            self._read_rows(of_panel.start, self._rows.rows(slice(rows)))
            self._numbers[rows:] = 0
            words = self._numbers.view(np.uint32)
            if self._format.bits == 4:
                words = words[:, 0::2] | words[:, 1::2] << np.uint32(4)
            elif self._format.bits in SHARING_LINES:
                words = _packed_sharing(self._format.bits, words)
            np.copyto(numbers[i], words.T)
            for name, plane in self._rows.planes.items():
                plane[rows:] = 0
                np.copyto(planes[name][i], plane.T)


def pack_quantized(
    weight: NDArray[Any], panel_columns: int, format: WeightFormat, parts: int = 1
) -> dict[str, NDArray[Any]]:
    """Quantizes and packs [N, K]: returns the array "numbers" and the planes of the format."""

    def read_rows(first: int, out: Quantized) -> None:
        format.quantize_rows(np.array(weight[first : first + len(out.numbers)], np.float32), out)

    n, k = weight.shape
    return _packed(n, k, panel_columns, format, read_rows, parts)


def pack_rows(weight: Quantized, panel_columns: int) -> dict[str, NDArray[Any]]:
    """As `pack_quantized`, for an already quantized weight."""

    def read_rows(first: int, out: Quantized) -> None:
        weight.rows(slice(first, first + len(out.numbers))).copy_to(out)

    n, k = weight.numbers.shape
    return _packed(n, k, panel_columns, weight.format, read_rows, 1)


def _packed(
    n: int, k: int, panel_columns: int, format: WeightFormat, read_rows: ReadQuantized, parts: int
) -> dict[str, NDArray[Any]]:
    shapes = QuantShapes.of(n, k, panel_columns, format, parts)
    words = np.empty(shapes.numbers[:3], np.uint32)
    planes = {p.name: np.empty(shapes.planes[p.name], p.numpy_dtype) for p in format.planes(k)}
    QuantPanelPacker(n, k, panel_columns, format, read_rows, parts).pack(0, words, planes)
    return {"numbers": words.view(np.uint8).reshape(shapes.numbers), **planes}


def unpack_quantized(arrays: dict[str, NDArray[Any]], n: int, k: int, format: WeightFormat) -> Quantized:
    """The inverse of `pack_quantized` for a weight [N, K]."""
    words = np.ascontiguousarray(arrays["numbers"]).view(np.uint32)[..., 0].transpose(0, 2, 1)
    words = words.reshape(-1, words.shape[2])[:n]
    if format.bits == 4:
        mask = np.uint32(0x0F0F0F0F)
        words = np.stack((words & mask, words >> 4 & mask), axis=-1).reshape(n, -1)
    elif format.bits in SHARING_LINES:
        words = _unpacked_sharing(format.bits, np.ascontiguousarray(words))

    def columns(array: NDArray[Any]) -> NDArray[Any]:
        return np.ascontiguousarray(array.transpose(0, 2, 1)).reshape(-1, array.shape[1])[:n]

    planes = {plane.name: columns(arrays[plane.name]) for plane in format.planes(k)}
    return Quantized(format, np.ascontiguousarray(words).view(np.uint8)[:, :k], planes)


def quantized_row_words(k: int, groups: int) -> int:
    """Words in a row of a quantized activation [T, K]: numbers, scale, and one sum per group."""
    return packed_words(k, 8) + 1 + groups


def quantize_activation(x: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """int8 numbers [T, K] and float32 scales [T], bit-equal to what the kernels make of `x` [T, K]."""
    largest = np.abs(x).max(1, initial=0).astype(np.float32)
    scale = largest / np.float32(127)
    inverse = np.float32(127) / np.maximum(largest, np.float32(1e-36))
    return np.clip(np.rint(x * inverse[:, None]), -127, 127).astype(np.int8), scale


def pack_quantized_activation(
    numbers: NDArray[np.int8], scale: NDArray[np.float32], row_tile: int, sums: Sums
) -> NDArray[np.int32]:
    """Words [ceil(T/R)][words of a row][R]: numbers, then the bits of the scale, then sums of groups.

    sums: of the weight format that reads them.
    """
    rows, k = numbers.shape
    groups, words = sums.groups(k), packed_words(k, 8)
    size = k if groups == 1 else sums.group_size
    out = np.zeros((-(-rows // row_tile) * row_tile, quantized_row_words(k, groups)), np.int32)
    padded = np.zeros((rows, words * 4), np.int8)
    padded[:, :k] = numbers
    out[:rows, :words] = padded.view(np.int32)
    out[:rows, words] = scale.view(np.int32)
    for group in range(groups):
        total = numbers[:, group * size : (group + 1) * size].sum(1, dtype=np.int32)
        out[:rows, words + 1 + group] = total * sums.factor
    return np.ascontiguousarray(out.reshape(-1, row_tile, out.shape[1]).transpose(0, 2, 1))
