"""Rows that take the place of a prompt's tokens, in Python and for the C ABI."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llmc.runtime.binding import abi

IDENTITY_BYTES = 32


@dataclasses.dataclass(frozen=True)
class PlacedRows:
    """Rows in place of the tokens from `first` on, such as those of an image.

    rows: float32 [n, states_width]. identity: 32 bytes that name their content, such as a SHA-256: the prefix cache
    takes rows of equal names to be equal.
    """

    first: int
    rows: npt.NDArray[np.float32]
    identity: bytes


class NativePlacedRows:
    """An array of llmc_placed_rows, valid while this object lives."""

    def __init__(self, placed: Sequence[PlacedRows], width: int) -> None:
        """width: states_width of the artifact. Raises ValueError for rows of another width or a name of another
        length."""
        native, kept = (abi.PlacedRows * len(placed))(), []
        for to, one in zip(native, placed, strict=True):
            rows = np.ascontiguousarray(one.rows, dtype=np.float32)
            if rows.ndim != 2 or rows.shape[1] != width:
                raise ValueError(f"rows have shape {rows.shape}; pass [number of rows, {width}]")
            if len(one.identity) != IDENTITY_BYTES:
                raise ValueError(f"identity has {len(one.identity)} bytes; pass {IDENTITY_BYTES}, such as a SHA-256")
            kept.append(rows)
            to.struct_size = ctypes.sizeof(abi.PlacedRows)
            to.first, to.num_rows, to.rows = one.first, len(rows), rows.ctypes.data_as(abi.F32P)
            to.identity[:] = one.identity
        self.array, self._kept = native, kept
