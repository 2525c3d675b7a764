"""Small floats: the values of their codes. Codes that numpy has a type for are views, not looked up."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.quantize.formats import fp8, tables

TABLES: dict[str, NDArray[np.float32]] = {"e4m3": fp8.VALUES, **tables.TABLES}
"""The value of every code, by kind of number."""


_POWERS = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan).astype(np.float32)


def e8m0(powers: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Powers of two from exponent bytes with bias 127; 255 is NaN."""
    return np.take(_POWERS, powers)


def widened(dtype: str, array: NDArray[Any]) -> NDArray[np.float32]:
    """The float32 values of a tensor, given its safetensors dtype (F32, F16, BF16, F8_E4M3 or F8_E8M0) and carrier
    array."""
    if dtype == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E4M3":
        return np.take(TABLES["e4m3"], array)
    if dtype == "F8_E8M0":
        return e8m0(array)
    return array.astype(np.float32)
