"""Log-probabilities from logits, in double precision."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Natural-log probabilities of each row."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted
