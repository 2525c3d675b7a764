"""SmoothQuant: what is hard to round in a layer's inputs is moved into its weight (Xiao et al., arXiv 2211.10438)."""

from __future__ import annotations

import numpy as np

from llmc.quantize.methods.grid import Floats

ALPHA = 0.5
_LEAST = np.float32(1e-5)


def smooth_scales(largest_input: Floats, largest_weight: Floats, alpha: float = ALPHA) -> Floats:
    """What each column of a weight is multiplied by, and its input divided: [K], of the largest magnitudes of both.

    alpha: how much of the inputs' range moves into the weight. A channel without inputs or weights stays as it is.
    """
    known = (largest_input > 0) & (largest_weight > 0)
    inputs, weights = np.maximum(largest_input, _LEAST), np.maximum(largest_weight, _LEAST)
    scales = inputs ** np.float32(alpha) / weights ** np.float32(1 - alpha)
    return np.where(known, np.maximum(scales, _LEAST), np.float32(1))
