"""Tables of 16 numbers indexed by 4-bit codes, by name, and rounding to the nearest code.

e2m1: the 4-bit floats of OCP's microscaling formats. nf4, fp4: bitsandbytes. iq4_nl: llama.cpp, integers.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
_HALVES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
TABLES: dict[str, Floats] = {
    "e2m1": np.concatenate([_HALVES, -_HALVES]),
    # Quantiles of a normal distribution (QLoRA, arXiv 2305.14314), as bitsandbytes writes them.
    "nf4": np.array(
        [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
         -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
         0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0],
        np.float32,
    ),
    # bitsandbytes' fp4, without infinities; differs from e2m1.
    "fp4": np.array(
        [0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25,
         -0.0, -0.0052083334885537624, -0.6666666865348816, -1.0, -0.3333333432674408, -0.5, -0.1666666716337204,
         -0.25],
        np.float32,
    ),
    "iq4_nl": np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32),
}  # fmt: skip
"""The number of each code, by table."""


def wanted_scale(table: str, low: Floats, high: Floats) -> Floats:
    """The scale that maps a group's value furthest from 0 to the table's number furthest from 0.

    low, high: least and largest value of each group. For a table of equal reach on both sides the scale is positive.
    """
    least, most = TABLES[table].min(), TABLES[table].max()
    if -least > most:
        signed: Floats = np.where(-low >= high, low, high) / least
        return signed
    positive: Floats = np.maximum(-low, high) / most
    return positive


def nearest(table: str, values: Floats) -> NDArray[np.uint8]:
    """The codes of the nearest numbers; a tie goes to the even code."""
    thresholds, codes = _thresholds(table)
    found: NDArray[np.uint8] = codes[np.searchsorted(thresholds, values)]
    return found


def codes_of(table: str, numbers: NDArray[Any]) -> NDArray[np.uint8]:
    """The codes of int8 numbers, all of which must be in an integer table."""
    codes = np.zeros(256, np.uint8)
    codes[TABLES[table].astype(np.int8).view(np.uint8)] = np.arange(16)
    found: NDArray[np.uint8] = codes[numbers.view(np.uint8)]
    return found


@cache
def _thresholds(table: str) -> tuple[Floats, NDArray[np.uint8]]:
    """Codes in order of value, and the thresholds between neighbours."""
    values, codes = np.unique(TABLES[table], return_index=True)
    middle = (values[1:] + values[:-1]) / np.float32(2)
    upwards = np.nextafter(middle, np.float32(-np.inf))
    return np.where(codes[:-1] % 2 == 0, middle, upwards), codes.astype(np.uint8)
