"""Weights and activations in the packed layouts of FORMAT.md, by numpy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]


def lanes_of_dtype(dtype: np.dtype) -> int:
    """Elements of one packed word: float32 1, bfloat16 2."""
    if dtype == np.float32:
        return 1
    if dtype == ml_dtypes.bfloat16:
        return 2
    raise ValueError(f"cannot pack a weight of dtype {dtype}; expected float32 or bfloat16")


def packed_shape(n: int, k: int, panel_columns: int, lanes: int) -> tuple[int, int, int, int]:
    """[ceil(N/C)][ceil(K/L)][C][L]"""
    return (-(-n // panel_columns), -(-k // lanes), panel_columns, lanes)


def pack_linear(weight: Array, panel_columns: int, lanes: int | None = None) -> Array:
    """[N, K] to [ceil(N/C)][K/L][C][L], zero padded. lanes defaults to that of the dtype."""
    if lanes is None:
        lanes = lanes_of_dtype(weight.dtype)
    n, k = weight.shape
    panels, words, columns, _ = packed_shape(n, k, panel_columns, lanes)
    # Transposing whole words moves 4 bytes at a time and keeps numpy on its fast copy.
    if n == panels * columns and k == words * lanes:
        padded = np.ascontiguousarray(weight)
    else:
        padded = np.zeros((panels * columns, words * lanes), weight.dtype)
        padded[:n, :k] = weight
    word = padded.view(np.uint32)
    out = np.ascontiguousarray(word.reshape(panels, columns, words).transpose(0, 2, 1))
    return out.view(weight.dtype).reshape(panels, words, columns, lanes)


def unpack_linear(packed: Array, n: int, k: int) -> Array:
    """The [N, K] weight of a packed one."""
    panels, words, columns, lanes = packed.shape
    return np.ascontiguousarray(packed.transpose(0, 2, 1, 3)).reshape(panels * columns, words * lanes)[:n, :k]


def pack_activation(x: Array, row_tile: int, lanes: int | None = None) -> Array:
    """[T, K] to [ceil(T/R)][K/L][R][L], zero padded (kernels write this layout; tests read it)."""
    return pack_linear(x, row_tile, lanes)


def unpack_activation(packed: Array, rows: int, k: int) -> Array:
    return unpack_linear(packed, rows, k)
