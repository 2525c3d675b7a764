"""When requests are sent."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt


def arrivals(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> npt.NDArray[np.float64]:
    """Send times of `count` requests, in seconds from the start: float64 [count], the first 0.

    rate: mean requests per second; infinity sends all at once. burstiness: shape of the gamma distribution of the
    intervals; 1 is a Poisson process, less is burstier, more is steadier.
    Raises ValueError for a rate or burstiness that is not above 0, or so small that times have no end.
    """
    if not rate > 0:
        raise ValueError(f"rate {rate} is not above 0: give requests a second, or inf")
    if not (burstiness > 0 and math.isfinite(burstiness)):
        raise ValueError(f"burstiness {burstiness} is not above 0: 1 is a Poisson process")
    if math.isinf(rate):
        return np.zeros(count)
    if not math.isfinite(1 / (rate * burstiness) * max(count, 1)):
        raise ValueError(f"rate {rate} is too small: no request but the first would ever be sent")
    draws = np.random.default_rng([seed, 1]).gamma(burstiness, 1 / (rate * burstiness), count)
    if count:
        draws[0] = 0.0
    return np.cumsum(draws)
