"""Groups of columns that share a scale: their size, and their column order where it differs from the weight's."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.quantize.checkpoints.base import AGAIN
from llmc.quantize.formats.base import WHOLE_ROW, QuantizeError
from llmc.shown import shown

_STEP = 32
"""Group sizes are multiples of this: kernels walk K in such steps."""


def check_group_size(prefix: str, group_size: int, k: int) -> None:
    """Raises QuantizeError unless `k` is a multiple of a group size that kernels support."""
    if group_size != WHOLE_ROW and (group_size < _STEP or group_size % _STEP or k % group_size):
        raise QuantizeError(
            f"{prefix} has rows of {k} numbers in groups of {shown(group_size)}; llmc reads groups of a multiple of "
            f"{_STEP} that divides them, or of -1 for a whole row: quantize the model with such groups"
        )


def grouped_columns(name: str, groups_of: NDArray[Any], group_size: int) -> NDArray[np.int32] | None:
    """The column order that makes groups contiguous; None if they already are.

    groups_of: the group of each column, from the tensor `name`. Raises QuantizeError unless each has `group_size`
    columns.
    """
    size = len(groups_of) if group_size == WHOLE_ROW else group_size
    expected = np.arange(len(groups_of)) // size
    if np.array_equal(groups_of, expected):
        return None
    wrong = (groups_of < 0) | (groups_of > expected[-1])
    if wrong.any():
        raise QuantizeError(f"{name} holds the group {groups_of[wrong][0]} of {expected[-1] + 1}; {AGAIN}")
    counts = np.bincount(groups_of, minlength=expected[-1] + 1)
    if (counts != size).any():
        group = int(np.argmax(counts != size))
        raise QuantizeError(f"{name} has {counts[group]} columns in group {group}, not {size}; {AGAIN}")
    return np.argsort(groups_of, kind="stable").astype(np.int32)
