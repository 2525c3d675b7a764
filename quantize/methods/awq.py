"""AWQ: scales salient input channels of a weight up before rounding, and their inputs down by the same factor.

Lin et al., arXiv 2306.00978. The scales are a power of the inputs' mean magnitudes; the power is the one with the least
output error. Then the range of each group is shrunk while that lowers the output error, one group at a time, given the
groups already settled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from llmc.quantize.formats.base import Quantized, WeightFormat
from llmc.quantize.methods.grid import Floats
from llmc.quantize.methods.grids import SHRINKS, find_grid, group_grams, round_to_nearest, settle

ALPHAS = tuple(step / 20 for step in range(20))
_COARSE = (1.0, 0.92, 0.84)
"""Range factors tried during the search for scales."""
_LEAST = np.float32(1e-4)
Each = Callable[[Callable[[Floats], float], Sequence[Floats]], Iterable[float]]


def channel_scales(magnitude: Floats, alpha: float) -> Floats:
    """Channel scales [K], centred on 1. magnitude: [K], mean magnitudes of the inputs."""
    scales = np.maximum(magnitude, np.float32(1e-8)) ** np.float32(alpha)
    scales /= np.sqrt(scales.max() * scales.min())
    return np.maximum(scales, _LEAST)


def powers_of_two(scales: Floats) -> Floats:
    """The nearest powers of two, by which floats are multiplied and divided exactly."""
    return np.exp2(np.rint(np.log2(scales)))


def search_scales(
    weight: Floats,
    gram: Floats,
    magnitude: Floats,
    format: WeightFormat,
    *,
    dtype: str = "f32",
    alphas: Sequence[float] = ALPHAS,
    largest: Floats | None = None,
    each: Each = map,
) -> Floats:
    """Finds the factors [K] for the columns of a weight [N, K]; inputs are divided by them.

    magnitude: see `channel_scales`. A power of 0 is tried too, which scales nothing. Others: see `errors_of`.
    """
    candidates = [channel_scales(magnitude, alpha) for alpha in alphas]
    return candidates[
        int(np.argmin(errors_of(weight, gram, candidates, format, dtype=dtype, largest=largest, each=each)))
    ]


def errors_of(
    weight: Floats,
    gram: Floats,
    candidates: Sequence[Floats],
    format: WeightFormat,
    *,
    dtype: str = "f32",
    largest: Floats | None = None,
    each: Each = map,
) -> list[float]:
    """The output error of a weight [N, K] whose columns are scaled by each of the candidates [K].

    gram: [K, K], the sum of x xᵀ over inputs, or a multiple of it.
    largest: [K], largest magnitudes of inputs that are rounded to int8; gram must then be a mean.
    each: a `map`, which may try several candidates in parallel.
    """
    groups = group_grams(gram, format)

    def error(scales: Floats) -> float:
        scaled = weight * scales
        of_groups = scales.reshape(len(groups), -1)
        blocks = groups / (of_groups[:, :, None] * of_groups[:, None, :])
        grid = find_grid(scaled, format, dtype=dtype, shrinks=_COARSE, gram=blocks)
        change = round_to_nearest(scaled, format, grid).value().astype(np.float32)
        change /= scales
        change -= weight
        moved = float(np.vdot(change @ gram, change))
        return moved if largest is None else moved + rounded_inputs_error(scaled, largest / scales)

    return list(each(error, candidates))


def rounded_inputs_error(weight: Floats, largest: Floats) -> float:
    """An upper bound on the mean squared output error of a token from rounding inputs to int8.

    The mean squared error of an input is step² / 12; a step is 1/127 of the largest input.
    """
    step = float(largest.max()) / 127
    return step * step / 12 * float(np.vdot(weight, weight))


def quantize_rows(
    weight: Floats, gram: Floats, format: WeightFormat, *, dtype: str = "f32", shrinks: Sequence[float] = SHRINKS
) -> Quantized:
    """Rounds rows [R, K] to nearest, each group in the range with the least output error, given the other groups.

    weight, gram: already scaled.
    """
    grid = find_grid(weight, format, dtype=dtype, shrinks=shrinks, gram=group_grams(gram, format), ends=True)
    if format.groups(weight.shape[1]) > 1:
        grid = settle(weight, format, grid, gram, dtype=dtype, shrinks=shrinks)
    return round_to_nearest(weight, format, grid)
