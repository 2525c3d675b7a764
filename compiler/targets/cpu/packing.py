"""Packs weights and activations into the layouts of FORMAT.md, with numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.dtypes import FLOATS_BY_LONG_NAME

Array = NDArray[Any]
ReadRows = Callable[[int, Array], None]


def lanes_of_dtype(dtype: np.dtype) -> int:
    """Elements of one packed word: float32 1, bfloat16 2."""
    if dtype.name not in FLOATS_BY_LONG_NAME:
        raise ValueError(f"cannot pack a weight of dtype {dtype}; expected {' or '.join(FLOATS_BY_LONG_NAME)}")
    return FLOATS_BY_LONG_NAME[dtype.name].per_word


def num_panels(n: int, panel_columns: int, parts: int = 1) -> int:
    """The number of panels of a weight of n rows; each part starts a new panel."""
    return parts * -(-(n // parts) // panel_columns)


def panel_rows(panel: int, n: int, panel_columns: int, parts: int = 1) -> range:
    """The rows of a weight that a panel holds."""
    size = n // parts
    part, unit = divmod(panel, num_panels(size, panel_columns))
    first = unit * panel_columns
    return range(part * size + first, part * size + min(first + panel_columns, size))


def packed_shape(n: int, k: int, panel_columns: int, lanes: int, parts: int = 1) -> tuple[int, int, int, int]:
    """[panels][ceil(K/L)][C][L]"""
    return (num_panels(n, panel_columns, parts), -(-k // lanes), panel_columns, lanes)


class PanelPacker:
    """Packs a weight a few panels at a time, through scratch memory that stays in cache. Not thread-safe.

    read_rows: writes rows [first, first + len(out)) of the [N, K] weight to `out`, which is strided. parts: number of
    equal row blocks that form the weight.
    """

    # Stride of the scratch in words: rows a multiple of a page apart would share a cache set.
    _GAP = 16

    def __init__(
        self, n: int, k: int, panel_columns: int, dtype: np.dtype, read_rows: ReadRows, parts: int = 1
    ) -> None:
        lanes = lanes_of_dtype(dtype)
        self._n, self._parts = n, parts
        self.panels, self.words, self._columns, _ = packed_shape(n, k, panel_columns, lanes, parts)
        # Zeros: elements that no row writes are padding.
        scratch = np.zeros((panel_columns, self.words + self._GAP), np.uint32)
        self._words = scratch[:, : self.words]
        self._rows = scratch.view(dtype)[:, :k]
        self._read_rows = read_rows

    def pack(self, first_panel: int, out: NDArray[np.uint32]) -> None:
        """Packs panels from `first_panel` on into `out` [count, words, panel_columns]."""
        for i in range(len(out)):
            rows = panel_rows(first_panel + i, self._n, self._columns, self._parts)
            self._read_rows(rows.start, self._rows[: len(rows)])
            if len(rows) < self._columns:
                self._words[len(rows) :] = 0
            # Copy whole words: numpy is fast for 4-byte items.
            np.copyto(out[i], self._words.T)


def pack_linear(weight: Array, panel_columns: int, parts: int = 1) -> Array:
    """Packs [N, K] float32 or bfloat16 into [panels][ceil(K/L)][C][L], zero-padded."""
    n, k = weight.shape

    def read_rows(first: int, out: Array) -> None:
        np.copyto(out, weight[first : first + len(out)])

    packer = PanelPacker(n, k, panel_columns, weight.dtype, read_rows, parts)
    out = np.empty((packer.panels, packer.words, panel_columns), np.uint32)
    packer.pack(0, out)
    return out.view(weight.dtype).reshape(packed_shape(n, k, panel_columns, lanes_of_dtype(weight.dtype), parts))


def unpack_linear(packed: Array, n: int, k: int) -> Array:
    """Recovers the [N, K] weight."""
    panels, words, columns, lanes = packed.shape
    return np.ascontiguousarray(packed.transpose(0, 2, 1, 3)).reshape(panels * columns, words * lanes)[:n, :k]


def pack_activation(x: Array, row_tile: int) -> Array:
    """Packs [T, K] into [ceil(T/R)][K/L][R][L], zero-padded. Kernels write this layout; tests read it."""
    return pack_linear(x, row_tile)


def unpack_activation(packed: Array, rows: int, k: int) -> Array:
    """Recovers the [rows, K] activation."""
    return unpack_linear(packed, rows, k)
