"""Numbers that a checkpoint stores quantized, as they are: what the packer takes over without rounding anything."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llmc.quantize.formats.base import Quantized, WeightFormat


class Stored(ABC):
    """A matrix [N, K] in a weight format.

    format: of its numbers. int8_inputs: the checkpoint was made for inputs that are rounded to int8. columns: number j
    of a row is that of column columns[j] of the weight; None: of column j. is_scattered: any read goes through the
    whole matrix.
    """

    format: WeightFormat
    int8_inputs: bool = False
    columns: NDArray[np.int32] | None = None
    is_scattered: bool = False

    @abstractmethod
    def read(self, first: int, out: Quantized) -> None:
        """Writes rows [first, first + len(out.numbers)). Threads may read at once.

        Raises ModelError for what no weight has.
        """

    def alike(self, others: Sequence[Stored]) -> Sequence[Stored] | None:
        """This matrix and others, all in one format that holds them exactly; None where there is none."""
        all_of = (self, *others)
        return all_of if len({(one.format, one.int8_inputs) for one in all_of}) == 1 else None
