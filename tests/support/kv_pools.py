"""What KV caches hold, in numpy: numbers of every dtype, and blocks as FORMAT.md lays them out."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
FP8 = {"fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2)}
SCALED = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
"""The largest number of each dtype that has scales."""


def pair_rows(x: Array) -> Array:
    """A pool as FORMAT.md lays it out: neighbours along the last axis but one share a word where several fit one."""
    lanes = 4 // x.dtype.itemsize
    *outer, rows, columns = x.shape
    return np.ascontiguousarray(x.reshape(*outer, rows // lanes, lanes, columns).swapaxes(-1, -2))


def unpair_rows(packed: Array) -> Array:
    """The inverse of `pair_rows`."""
    *outer, words, columns, lanes = packed.shape
    return packed.swapaxes(-1, -2).reshape(*outer, words * lanes, columns)


def numbers_of(x: Array, kv: str) -> tuple[Array, Array]:
    """(numbers uint8 as they are stored, scales float32 without the last axis) of rows along the last axis."""
    x, most = x.astype(np.float32), np.float32(SCALED[kv])
    with np.errstate(invalid="ignore", divide="ignore"):
        widest = np.abs(x).max(-1)
        scaled = x * (most / np.fmax(widest, np.float32(1e-30)))[..., None]
        return rounded(scaled, kv), (widest / most).astype(np.float32)


def rounded(scaled: Array, kv: str) -> Array:
    """Numbers as they are stored, of what is divided by its scale already; saturating."""
    most = np.float32(SCALED[kv])
    clipped = np.fmin(np.fmax(scaled, -most), most)
    if kv == "int8":
        return np.asarray(np.rint(clipped) + 128, np.uint8)
    return np.asarray(clipped.astype(FP8[kv]).view(np.uint8))


def floats_of(numbers: Array, kv: str) -> Array:
    """What stored numbers are before they are multiplied by their scale, float32."""
    if kv == "int8":
        return np.asarray(numbers.astype(np.float32) - 128)
    return np.asarray(numbers.view(FP8[kv]).astype(np.float32))


def stands_for(x: Array, kv: str) -> Array:
    """float64: what a cache makes of rows along the last axis."""
    if kv not in SCALED:
        return x.astype(np.float64)
    numbers, scales = numbers_of(x, kv)
    return floats_of(numbers, kv).astype(np.float64) * scales[..., None]


def _with_scales(numbers: Array, scales: Array) -> Array:
    """One head's part of a block: numbers, then the scale of each token."""
    blocks, heads = numbers.shape[:2]
    parts = (part.reshape(blocks, heads, -1) for part in (numbers, np.ascontiguousarray(scales).view(np.uint8)))
    return np.concatenate(list(parts), axis=2)


def row_pool(rows: Array, dim: int, kv: str) -> Array:
    """A pool in layout `rows`. rows: [blocks, heads, block, padded dim]; padding of scaled numbers has zero bytes."""
    if kv not in SCALED:
        return np.ascontiguousarray(rows)
    numbers, scales = numbers_of(rows[..., :dim], kv)
    return _with_scales(np.pad(numbers, [(0, 0)] * 3 + [(0, rows.shape[-1] - dim)]), scales)


def key_pool(keys: Array, kv: str) -> Array:
    """keys: [blocks, heads, dim, block]."""
    if kv not in SCALED:
        return pair_rows(keys)
    numbers, scales = numbers_of(keys.swapaxes(-1, -2), kv)
    return _with_scales(pair_rows(np.ascontiguousarray(numbers.swapaxes(-1, -2))), scales)


def latent_pool(keys: Array, rank: int, kv: str) -> Array:
    """keys: [blocks, 1, dim, block]; of each, the first `rank` elements share a scale, and the others another one."""
    if kv not in SCALED:
        return pair_rows(keys)
    numbers, scales = _of_parts(keys, rank, kv)
    return _with_scales(pair_rows(np.ascontiguousarray(numbers.swapaxes(-1, -2))), scales)


def latent_row_pool(keys: Array, rank: int, kv: str) -> Array:
    """As `latent_pool`, in layout `rows`."""
    if kv not in SCALED:
        return np.ascontiguousarray(keys.swapaxes(-1, -2))
    return _with_scales(*_of_parts(keys, rank, kv))


def _of_parts(keys: Array, rank: int, kv: str) -> tuple[Array, Array]:
    """(numbers [blocks, 1, block, dim], scales [blocks, 1, 2, block])."""
    wide = keys.swapaxes(-1, -2)
    parts = [numbers_of(part, kv) for part in (wide[..., :rank], wide[..., rank:])]
    return np.concatenate([part for part, _ in parts], -1), np.stack([scale for _, scale in parts], 2)


def value_pool(values: Array, dim: int, kv: str) -> Array:
    """values: [blocks, heads, block, padded dim]; padding has zero bytes."""
    if kv not in SCALED:
        return pair_rows(values)
    numbers, scales = numbers_of(values[..., :dim], kv)
    padding = [(0, 0)] * 3 + [(0, values.shape[-1] - dim)]
    return _with_scales(pair_rows(np.pad(numbers, padding)), scales)
