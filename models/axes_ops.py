"""The llmc ops of tokens whose rotary positions have several axes; `ops.py` has the others.

T tokens; P rows of the rotary table, each of R numbers: cosines, then sines.
"""

# torch reads op schemas from the annotations, so they must be types, not strings.

import torch
from torch import Tensor

from llmc.models.ops import llmc_op


@llmc_op("rope_rows")
def rope_rows(cos_sin: Tensor, positions: Tensor, axes: str) -> Tensor:
    """A row of angles for each token: [T, R] of cos_sin float32 [P, R].

    positions: i32 [T, axes]. axes: a digit for each frequency, the axis of the position that it follows.
    """
    followed = torch.tensor([int(digit) for digit in axes * 2])
    return cos_sin[positions.long()[:, followed], torch.arange(len(followed))]


@rope_rows.register_fake
def _(cos_sin: Tensor, positions: Tensor, axes: str) -> Tensor:
    return cos_sin.new_empty((positions.shape[0], cos_sin.shape[1]))


@llmc_op("row_numbers")
def row_numbers(positions: Tensor) -> Tensor:
    """0, 1, …: i32 [T]. positions i32 [T] tells only how many."""
    return torch.arange(len(positions), dtype=torch.int32)


@row_numbers.register_fake
def _(positions: Tensor) -> Tensor:
    return torch.empty_like(positions)
