"""Conversions between dtypes of checkpoints and of packed weights, bit-identical to torch."""

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
# The bf16 form of NaN; torch has two.
_NAN_BF16 = {DTYPES["f32"]: 0xFFFF, DTYPES["f16"]: 0x7FC0}


def convert(source: Array, out: Array) -> None:
    """Converts `source` into `out` of equal shape, both f32, f16 or bf16; rounds to nearest, ties to even.

    f16 overflow becomes infinity. NaN narrowed to bf16 always becomes torch's NaN. Raises ValueError on other dtypes or
    shapes.
    """
    if source.shape != out.shape or not {source.dtype, out.dtype} <= set(DTYPES.values()):
        raise ValueError(f"cannot convert {source.dtype} {source.shape} to {out.dtype} {out.shape}")
    if source.dtype == out.dtype:
        # Compare bytes, so that no NaN is quieted on the way.
        word = np.uint16 if source.dtype.itemsize == 2 else np.uint32
        np.copyto(out.view(word), source.view(word))
    elif out.dtype == DTYPES["f32"] and source.dtype == DTYPES["bf16"]:
        np.left_shift(source.view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)
    elif out.dtype == DTYPES["f32"]:
        np.copyto(out, source)
    else:
        _narrow(source, out)


def _narrow(source: Array, out: Array) -> None:
    """Converts between 16-bit dtypes, or from f32 to one, in runs of rows."""
    if source.ndim == 0:
        source, out = source[None], out[None]
    rows = max(1, _BLOCK // max(1, source[0].size)) if len(source) else 1
    for first in range(0, len(source), rows):
        some = slice(first, first + rows)
        block = np.ascontiguousarray(source[some], np.float32)
        if out.dtype == DTYPES["f16"]:
            with np.errstate(over="ignore", invalid="ignore"):
                np.copyto(out[some], block, casting="same_kind")
        else:
            np.copyto(out[some].view(np.uint16), _bits_of_bf16(block, source.dtype), casting="unsafe")


def _bits_of_bf16(block: NDArray[np.float32], source: np.dtype[Any]) -> Array:
    """The bits of the nearest bf16. source: the values' original dtype."""
    bits = block.view(np.uint32)
    rounded = (bits >> 16) & 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    nan = np.isnan(block)
    if nan.any():
        rounded[nan] = _NAN_BF16[source]
    return rounded
