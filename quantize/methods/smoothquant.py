"""SmoothQuant: moves the outliers of a layer's inputs into its weight (Xiao et al., arXiv 2211.10438)."""

from __future__ import annotations

import numpy as np

from llmc.quantize.methods.grid import Floats

ALPHA = 0.5
_LEAST = np.float32(1e-5)


def smooth_scales(largest_input: Floats, largest_weight: Floats, alpha: float = ALPHA) -> Floats:
    """Factors [K] for the weight's columns, by which inputs are divided, from the largest magnitudes [K] of both.

    alpha: share of the inputs' range that moves into the weight. A channel with zero inputs or weights gets factor 1.
    """
    known = (largest_input > 0) & (largest_weight > 0)
    inputs, weights = np.maximum(largest_input, _LEAST), np.maximum(largest_weight, _LEAST)
    scales = inputs ** np.float32(alpha) / weights ** np.float32(1 - alpha)
    return np.where(known, np.maximum(scales, _LEAST), np.float32(1))
