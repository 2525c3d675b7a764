"""Numbers that a checkpoint stores quantized; the packer copies them without rounding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llmc.quantize.formats.base import Quantized, WeightFormat


class Stored(ABC):
    """A matrix [N, K] in a weight format.

    format: of its numbers. int8_inputs: whether the checkpoint expects inputs rounded to int8. columns: number j of a
    row belongs to column columns[j] of the weight; None for identity. is_scattered: whether any read must scan the
    whole matrix.
    """

    format: WeightFormat
    int8_inputs: bool = False
    columns: NDArray[np.int32] | None = None
    is_scattered: bool = False

    @abstractmethod
    def read(self, first: int, out: Quantized) -> None:
        """Writes rows [first, first + len(out.numbers)). Thread-safe.

        Raises ModelError for invalid values.
        """

    def alike(self, others: Sequence[Stored]) -> Sequence[Stored] | None:
        """This matrix and others, all in one format that holds them exactly; None if there is none."""
        all_of = (self, *others)
        return all_of if len({(one.format, one.int8_inputs) for one in all_of}) == 1 else None
