"""Slopes of ALiBi by number of heads, float32, as the authors of models compute them."""

from __future__ import annotations

import numpy as np


def paper_slopes(num_heads: int) -> tuple[float, ...]:
    """Of the paper: a geometric series down to 2⁻⁸. Heads beyond the largest power of two take every other one of the
    series of twice as many."""
    power = 1 << (num_heads.bit_length() - 1)
    exponents = [8.0 / power * i for i in range(1, power + 1)]
    exponents += [4.0 / power * i for i in range(1, 2 * (num_heads - power), 2)]
    return _powers(exponents)


def mpt_slopes(num_heads: int, bias_max: float) -> tuple[float, ...]:
    """Of MPT: a series down to 2 to the −bias_max. Where heads are no power of two, of the series of the next one the
    second, fourth, …, then the first, third, …."""
    power = 1 << (num_heads - 1).bit_length()
    exponents = [bias_max / power * i for i in range(1, power + 1)]
    return _powers(exponents if power == num_heads else [*exponents[1::2], *exponents[::2]][:num_heads])


def _powers(exponents: list[float]) -> tuple[float, ...]:
    """2 to the −exponent."""
    return tuple(float(np.float32(2.0**-exponent)) for exponent in exponents)
