"""The fields of blocks, before any multiplication."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmc.models.convert import Array


@dataclass(frozen=True)
class Parts:
    """value = scale · step · number − offset · shift, with each product rounded to float32, from the left.

    numbers: int8 [blocks, elements of a block]. scale, offset: float32 [blocks, 1]. step, shift: integers [blocks,
    groups of a block]; None means 1.
    """

    numbers: Array
    scale: Array
    step: Array | None = None
    offset: Array | None = None
    shift: Array | None = None

    def write(self, out: Array) -> None:
        """Writes the values to float32 [blocks, elements of a block]."""
        scale = self.scale if self.step is None else self.scale * self.step
        grouped = out.reshape(*scale.shape, -1)
        np.multiply(scale[:, :, None], self.numbers.reshape(grouped.shape), out=grouped)
        if self.offset is not None:
            grouped -= (self.offset if self.shift is None else self.offset * self.shift)[:, :, None]
