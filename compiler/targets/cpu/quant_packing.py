"""Quantized weights and activations in the packed layouts of FORMAT.md, by numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.targets.cpu.packing import ReadRows, num_panels, panel_rows
from llmc.quantize.rtn import Quantized, quantize_rows
from llmc.quantize.scheme import WeightFormat

LINE = 8
"""Elements of K that belong together: two words of 8-bit numbers, one of 4-bit ones. K is padded to a multiple."""


def packed_words(k: int, bits: int) -> int:
    """Words of 4 bytes of one column."""
    return -(-k // LINE) * bits // 4


@dataclass(frozen=True)
class QuantShapes:
    """Packed shapes of a weight [N, K]: numbers uint8, scale float32, uint8 of each group where the format has them."""

    numbers: tuple[int, int, int, int]
    scale: tuple[int, int, int]
    of_group: tuple[int, int, int] | None

    @classmethod
    def of(cls, n: int, k: int, panel_columns: int, format: WeightFormat, parts: int = 1) -> QuantShapes:
        panels = num_panels(n, panel_columns, parts)
        numbers = (panels, packed_words(k, format.bits), panel_columns, 4)
        scale, groups = ((panels, count, panel_columns) for count in (format.scales(k), format.groups(k)))
        return cls(numbers, scale, groups if format.of_group else None)


class QuantPanelPacker:
    """Quantizes and packs a weight some panels at a time through scratch memory; not shared between threads.

    read_rows: writes rows [first, first + len(out)) of the [N, K] weight to the float32 array `out`. parts: as of
    PanelPacker.
    """

    def __init__(
        self, n: int, k: int, panel_columns: int, format: WeightFormat, read_rows: ReadRows, parts: int = 1
    ) -> None:
        self._n, self._columns, self._format, self._read_rows = n, panel_columns, format, read_rows
        self._parts = parts
        self._rows = np.empty((panel_columns, k), np.float32)
        # Zeros: what no row writes is the padding.
        self._numbers = np.zeros((panel_columns, packed_words(k, 8) * 4), np.uint8)
        self._scale = np.zeros((panel_columns, format.scales(k)), np.float32)
        self._of_group = np.zeros((panel_columns, format.groups(k)), np.uint8) if format.of_group else None
        self._k = k

    def pack(
        self,
        first_panel: int,
        numbers: NDArray[np.uint32],
        scale: NDArray[np.float32],
        of_group: NDArray[np.uint8] | None,
    ) -> None:
        """Writes panels from `first_panel` on. numbers: words [count, words, C]; scale: [count, scales, C]; of_group:
        [count, groups, C]."""
        for i in range(len(numbers)):
            of_panel = panel_rows(first_panel + i, self._n, self._columns, self._parts)
            rows = len(of_panel)
            self._read_rows(of_panel.start, self._rows[:rows])
            of_some = None if self._of_group is None else self._of_group[:rows]
            quantize_rows(self._rows[:rows], self._numbers[:rows, : self._k], self._scale[:rows], of_some, self._format)
            self._numbers[rows:] = 0
            self._scale[rows:] = 0
            words = self._numbers.view(np.uint32)
            if self._format.bits == 4:
                words = words[:, 0::2] | words[:, 1::2] << np.uint32(4)
            np.copyto(numbers[i], words.T)
            np.copyto(scale[i], self._scale.T)
            if of_group is not None and self._of_group is not None:
                self._of_group[rows:] = 0
                np.copyto(of_group[i], self._of_group.T)


def pack_quantized(
    weight: NDArray[Any], panel_columns: int, format: WeightFormat, parts: int = 1
) -> dict[str, NDArray[Any]]:
    """Quantizes and packs [N, K]: arrays "numbers", "scale" and what the format stores of groups."""
    n, k = weight.shape
    shapes = QuantShapes.of(n, k, panel_columns, format, parts)

    def read_rows(first: int, out: NDArray[Any]) -> None:
        np.copyto(out, weight[first : first + len(out)])

    words = np.empty(shapes.numbers[:3], np.uint32)
    scale = np.empty(shapes.scale, np.float32)
    of_group = np.empty(shapes.of_group, np.uint8) if shapes.of_group is not None else None
    QuantPanelPacker(n, k, panel_columns, format, read_rows, parts).pack(0, words, scale, of_group)
    arrays: dict[str, NDArray[Any]] = {"numbers": words.view(np.uint8).reshape(shapes.numbers), "scale": scale}
    return arrays if of_group is None else {**arrays, format.of_group: of_group}


def unpack_quantized(arrays: dict[str, NDArray[Any]], n: int, k: int, format: WeightFormat) -> Quantized:
    """What `pack_quantized` packed of a weight [N, K]."""
    words = np.ascontiguousarray(arrays["numbers"]).view(np.uint32)[..., 0].transpose(0, 2, 1)
    words = words.reshape(-1, words.shape[2])[:n]
    if format.bits == 4:
        mask = np.uint32(0x0F0F0F0F)
        words = np.stack((words & mask, words >> 4 & mask), axis=-1).reshape(n, -1)

    def columns(array: NDArray[Any]) -> NDArray[Any]:
        return np.ascontiguousarray(array.transpose(0, 2, 1)).reshape(-1, array.shape[1])[:n]

    of_group = columns(arrays[format.of_group]) if format.of_group else None
    numbers = np.ascontiguousarray(words).view(np.uint8)[:, :k]
    return Quantized(format, numbers, columns(arrays["scale"]), of_group)


def quantized_row_words(k: int, groups: int) -> int:
    """Words that a row of a quantized activation [T, K] takes: its numbers, its scale, a sum for each group."""
    return packed_words(k, 8) + 1 + groups


def quantize_activation(x: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Numbers int8 [T, K] and scales float32 [T] as the kernels make them from `x` [T, K]."""
    largest = np.abs(x).max(1, initial=0).astype(np.float32)
    scale = largest / np.float32(127)
    inverse = np.float32(127) / np.maximum(largest, np.float32(1e-36))
    return np.clip(np.rint(x * inverse[:, None]), -127, 127).astype(np.int8), scale


def pack_quantized_activation(
    numbers: NDArray[np.int8], scale: NDArray[np.float32], row_tile: int, format: WeightFormat
) -> NDArray[np.int32]:
    """Words [ceil(T/R)][words of a row][R]: numbers, then the bits of the scale, then sums of groups (sum_factor).

    format: of the weight that reads them.
    """
    format = format.sums
    rows, k = numbers.shape
    groups, words = format.groups(k), packed_words(k, 8)
    size = k if groups == 1 else format.group_size
    out = np.zeros((-(-rows // row_tile) * row_tile, quantized_row_words(k, groups)), np.int32)
    padded = np.zeros((rows, words * 4), np.int8)
    padded[:, :k] = numbers
    out[:rows, :words] = padded.view(np.int32)
    out[:rows, words] = scale.view(np.int32)
    for group in range(groups):
        total = numbers[:, group * size : (group + 1) * size].sum(1, dtype=np.int32)
        out[:rows, words + 1 + group] = total * format.sum_factor
    return np.ascontiguousarray(out.reshape(-1, row_tile, out.shape[1]).transpose(0, 2, 1))
