"""Round to nearest, with scales from the range of each group."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.quantize.formats.base import Quantized, WeightFormat


def quantize(weight: NDArray[Any], format: WeightFormat) -> Quantized:
    """Quantizes [N, K] float32. Raises QuantizeError on a value that is not finite."""
    out = Quantized.empty(format, *weight.shape)
    format.quantize_rows(np.array(weight, np.float32), out)
    return out
