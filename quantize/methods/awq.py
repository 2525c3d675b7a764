"""AWQ: input channels that matter are made larger before rounding, and their inputs smaller by as much.

Lin et al., arXiv 2306.00978. The scales are a power of the inputs' magnitudes; the power is the one with the least
error of the layer's outputs. Then the range of every group is shrunk while that makes the outputs better, one group
after another: what the groups before it change is taken into account.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from llmc.quantize.formats.base import Quantized, WeightFormat
from llmc.quantize.methods.grid import Floats
from llmc.quantize.methods.grids import SHRINKS, find_grid, group_grams, round_to_nearest, settle

ALPHAS = tuple(step / 20 for step in range(20))
_COARSE = (1.0, 0.92, 0.84)
"""What ranges are multiplied by while scales are looked for."""
_LEAST = np.float32(1e-4)


def channel_scales(magnitude: Floats, alpha: float) -> Floats:
    """[K], around 1. magnitude: [K], the mean of the inputs' magnitudes."""
    scales = np.maximum(magnitude, np.float32(1e-8)) ** np.float32(alpha)
    scales /= np.sqrt(scales.max() * scales.min())
    return np.maximum(scales, _LEAST)


def search_scales(
    weight: Floats,
    gram: Floats,
    magnitude: Floats,
    format: WeightFormat,
    *,
    dtype: str = "f32",
    alphas: Sequence[float] = ALPHAS,
    largest: Floats | None = None,
    each: Callable[[Callable[[float], float], Sequence[float]], Iterable[float]] = map,
) -> Floats:
    """What the columns of a weight [N, K] are best multiplied by, and its inputs divided.

    gram: [K, K], the sum of x xᵀ of the inputs, or a multiple of it. magnitude: see `channel_scales`; 0 is among the
    powers, so that no scales at all are tried, too. largest: the inputs' largest magnitudes, [K], where inputs are
    rounded to int8; gram is a mean then. each: like map, and may try several powers at once.
    """
    groups = group_grams(gram, format)

    def error(alpha: float) -> float:
        scales = channel_scales(magnitude, alpha)
        scaled = weight * scales
        of_groups = scales.reshape(len(groups), -1)
        blocks = groups / (of_groups[:, :, None] * of_groups[:, None, :])
        grid = find_grid(scaled, format, dtype=dtype, shrinks=_COARSE, gram=blocks)
        change = round_to_nearest(scaled, format, grid).value().astype(np.float32)
        change /= scales
        change -= weight
        moved = float(np.vdot(change @ gram, change))
        return moved if largest is None else moved + rounded_inputs_error(scaled, largest / scales)

    errors = list(each(error, alphas))
    return channel_scales(magnitude, alphas[int(np.argmin(errors))])


def rounded_inputs_error(weight: Floats, largest: Floats) -> float:
    """What rounding inputs to int8 adds to the squares of a token's outputs, at most. Each input is off by a twelfth of
    the square of a step, and a step is a 127th of the largest input.
    """
    step = float(largest.max()) / 127
    return step * step / 12 * float(np.vdot(weight, weight))


def quantize_rows(
    weight: Floats, gram: Floats, format: WeightFormat, *, dtype: str = "f32", shrinks: Sequence[float] = SHRINKS
) -> Quantized:
    """Rows [R, K] rounded to nearest, each group in the range that is best for the outputs, given those of the others.

    weight, gram: scaled already.
    """
    grid = find_grid(weight, format, dtype=dtype, shrinks=shrinks, gram=group_grams(gram, format), ends=True)
    if format.groups(weight.shape[1]) > 1:
        grid = settle(weight, format, grid, gram, dtype=dtype, shrinks=shrinks)
    return round_to_nearest(weight, format, grid)
