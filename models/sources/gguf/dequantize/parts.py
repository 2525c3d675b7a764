"""What blocks say of their elements before anything is multiplied."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmc.models.convert import Array


@dataclass(frozen=True)
class Parts:
    """value = scale · step · number − offset · shift, products rounded to float32 one by one from the left.

    numbers: int8 [blocks, elements of a block]; scale, offset: float32 [blocks, 1]; step, shift: integers [blocks,
    groups of a block], 1 where they are None.
    """

    numbers: Array
    scale: Array
    step: Array | None = None
    offset: Array | None = None
    shift: Array | None = None

    def write(self, out: Array) -> None:
        """The values, to float32 [blocks, elements of a block]."""
        scale = self.scale if self.step is None else self.scale * self.step
        grouped = out.reshape(*scale.shape, -1)
        np.multiply(scale[:, :, None], self.numbers.reshape(grouped.shape), out=grouped)
        if self.offset is not None:
            grouped -= (self.offset if self.shift is None else self.offset * self.shift)[:, :, None]
