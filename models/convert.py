"""Conversions between the dtypes of checkpoints and of packed weights, bit for bit as torch does them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

DTYPES: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}
"""numpy dtype by name."""
_BLOCK = 1 << 16  # elements whose temporaries stay in cache
# What a NaN becomes in bf16; torch has two answers.
_NAN_BF16 = {DTYPES["f32"]: 0xFFFF, DTYPES["f16"]: 0x7FC0}


def convert(source: Array, out: Array) -> None:
    """Writes `source` (f32, f16 or bf16) to `out` (f32 or bf16) of the same shape; rounds to nearest, ties to even.

    A NaN that is narrowed to bf16 becomes one NaN, the one of torch. Raises ValueError on other dtypes or shapes.
    """
    if source.shape != out.shape or source.dtype not in DTYPES.values() or out.dtype == DTYPES["f16"]:
        raise ValueError(f"cannot convert {source.dtype} {source.shape} to {out.dtype} {out.shape}")
    if source.dtype == out.dtype:
        # Bytes, so that no NaN is quieted on the way.
        word = np.uint16 if source.dtype.itemsize == 2 else np.uint32
        np.copyto(out.view(word), source.view(word))
    elif source.dtype == DTYPES["bf16"]:
        np.left_shift(source.view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)
    elif out.dtype == DTYPES["f32"]:
        np.copyto(out, source)
    else:
        _narrow(source, out.view(np.uint16))


def _narrow(source: Array, out: Array) -> None:
    """f32 or f16 to the bits of bf16, some rows at a time."""
    if source.ndim == 0:
        source, out = source[None], out[None]
    rows = max(1, _BLOCK // max(1, source[0].size)) if len(source) else 1
    for first in range(0, len(source), rows):
        block = np.asarray(source[first : first + rows], np.float32)
        bits = np.ascontiguousarray(block).view(np.uint32)
        rounded = (bits >> 16) & 1
        rounded += 0x7FFF
        rounded += bits
        rounded >>= 16
        nan = np.isnan(block)
        if nan.any():
            rounded[nan] = _NAN_BF16[source.dtype]
        np.copyto(out[first : first + rows], rounded, casting="unsafe")
