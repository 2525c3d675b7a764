"""Rows that take the place of a prompt's tokens, in Python and for the C ABI."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.graphs_format import ROPE_AXES
from llmc.runtime.binding import abi
from llmc.runtime.binding.handle import int32

IDENTITY_BYTES = 32


@dataclasses.dataclass(frozen=True)
class PlacedRows:
    """Rows in place of the tokens from `first` on, such as those of an image.

    rows: float32 [n, states_width]. identity: 32 bytes that name their content, such as a SHA-256: the prefix cache
    takes rows of equal names to be equal. positions: int32 [n, 3] rotary positions, counted from that of the first row,
    of a model that has axes; None: those of tokens. advance: with positions, how much further the token behind the rows
    is.
    """

    first: int
    rows: npt.NDArray[np.float32]
    identity: bytes
    positions: npt.NDArray[np.int32] | None = None
    advance: int = 0


class NativePlacedRows:
    """An array of llmc_placed_rows, valid while this object lives."""

    def __init__(self, placed: Sequence[PlacedRows], width: int) -> None:
        """width: states_width of the artifact. Raises ValueError for rows of another width or a name of another
        length."""
        native = (abi.PlacedRows * len(placed))()
        kept: list[npt.NDArray[Any]] = []
        for to, one in zip(native, placed, strict=True):
            rows = np.ascontiguousarray(one.rows, dtype=np.float32)
            if rows.ndim != 2 or rows.shape[1] != width:
                raise ValueError(f"rows have shape {rows.shape}; pass [number of rows, {width}]")
            if len(one.identity) != IDENTITY_BYTES:
                raise ValueError(f"identity has {len(one.identity)} bytes; pass {IDENTITY_BYTES}, such as a SHA-256")
            kept.append(rows)
            if one.positions is not None:
                positions = int32("positions", one.positions, ndim=2)
                if positions.shape != (len(rows), ROPE_AXES):
                    raise ValueError(f"positions have shape {positions.shape}; pass {(len(rows), ROPE_AXES)}")
                kept.append(positions)
                to.positions, to.advance = positions.ctypes.data_as(abi.I32P), one.advance
            to.struct_size = ctypes.sizeof(abi.PlacedRows)
            to.first, to.num_rows, to.rows = one.first, len(rows), rows.ctypes.data_as(abi.F32P)
            to.identity[:] = one.identity
        self.array, self._kept = native, kept
