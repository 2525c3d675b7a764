"""ALiBi slopes by number of heads, float32, computed as the models' authors do."""

from __future__ import annotations

import numpy as np


def paper_slopes(num_heads: int) -> tuple[float, ...]:
    """Slopes of the ALiBi paper: a geometric series down to 2⁻⁸. Heads beyond the largest power of two take every other
    slope of the series for twice as many."""
    power = 1 << (num_heads.bit_length() - 1)
    exponents = [8.0 / power * i for i in range(1, power + 1)]
    exponents += [4.0 / power * i for i in range(1, 2 * (num_heads - power), 2)]
    return _powers(exponents)


def mpt_slopes(num_heads: int, bias_max: float) -> tuple[float, ...]:
    """Slopes of MPT: a series down to 2^−bias_max. If the number of heads is no power of two, takes from the next
    power's series the second, fourth, …, then the first, third, …."""
    power = 1 << (num_heads - 1).bit_length()
    exponents = [bias_max / power * i for i in range(1, power + 1)]
    return _powers(exponents if power == num_heads else [*exponents[1::2], *exponents[::2]][:num_heads])


def _powers(exponents: list[float]) -> tuple[float, ...]:
    """2^−exponent, for each exponent."""
    return tuple(float(np.float32(2.0**-exponent)) for exponent in exponents)
