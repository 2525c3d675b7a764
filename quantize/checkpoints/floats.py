"""Small floats: the numbers that their codes stand for. Codes of numpy's own types are views, not looked up."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def _e4m3() -> NDArray[np.float32]:
    """float8_e4m3fn: exponents biased by 7, no infinities, NaN where all bits below the sign are set."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, (code & 7).astype(np.float64)
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    value = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    value[(code & 127) == 127] = np.nan
    return np.where(code < 128, value, -value).astype(np.float32)


def _e2m1() -> NDArray[np.float32]:
    half = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    return np.concatenate([half, -half])


TABLES: dict[str, NDArray[np.float32]] = {
    "e4m3": _e4m3(),
    "e2m1": _e2m1(),
    # Quantiles of a normal distribution (QLoRA, arXiv 2305.14314), as bitsandbytes writes them.
    "nf4": np.array(
        [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
         -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
         0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0],
        np.float32,
    ),
    # bitsandbytes' own, without infinities; not e2m1.
    "fp4": np.array(
        [0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25,
         -0.0, -0.0052083334885537624, -0.6666666865348816, -1.0, -0.3333333432674408, -0.5, -0.1666666716337204,
         -0.25],
        np.float32,
    ),
}  # fmt: skip
"""Values of all codes of a kind of number, by the kind's name."""


_POWERS = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan).astype(np.float32)


def e8m0(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Powers of two, biased by 127; 255 is NaN."""
    return np.take(_POWERS, codes)


def widened(dtype: str, array: NDArray[Any]) -> NDArray[np.float32]:
    """The float32 values of a tensor of safetensors' `dtype` (F32, F16, BF16, F8_E4M3 or F8_E8M0), in its carrier."""
    if dtype == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E4M3":
        return np.take(TABLES["e4m3"], array)
    if dtype == "F8_E8M0":
        return e8m0(array)
    return array.astype(np.float32)
