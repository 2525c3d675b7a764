"""Pools of adapters, and tiles of rows, as kernels read them (FORMAT.md)."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from llmc.adapter_slot import AdapterSlot
from llmc.graphs_format import TILE_RECORD, TILE_ROWS

Array = NDArray[Any]
NUMBERS = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}


def packed(matrix: Array, tile_rows: int, tile_columns: int, dtype: str) -> bytes:
    """As FORMAT.md has it: tiles of tile_rows × tile_columns, row by row of tiles."""
    rows, columns = matrix.shape
    whole = np.zeros((-(-rows // tile_rows) * tile_rows, -(-columns // tile_columns) * tile_columns), np.float32)
    whole[:rows, :columns] = matrix
    lying = whole.reshape(len(whole) // tile_rows, tile_rows, -1, tile_columns).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(lying).astype(NUMBERS[dtype]).tobytes()


def slot_bytes(slot: AdapterSlot, matrices: dict[int, tuple[Array, Array, float]], dtype: str) -> Array:
    """A slot with the A, B and scale of some parts; what nothing may read is not a number."""
    data = np.full(slot.bytes, 0xFF, np.uint8)
    data[:64] = 0
    for part, (a, b, scale) in matrices.items():
        head = np.array([len(a)], np.int32).tobytes() + np.array([scale], np.float32).tobytes()
        for at, content in (
            (8 * part, head),
            (slot.a_offset(part), packed(a, slot.tile_rows, slot.tile_columns, dtype)),
            (slot.b_offset(part), packed(b, slot.tile_rows, slot.tile_columns, dtype)),
        ):
            data[at : at + len(content)] = np.frombuffer(content, np.uint8)
    return data


def tiles_of(rows: dict[int, list[int]], capacity: int) -> Array:
    """rows: of each slot."""
    tiles = np.full(1 + TILE_RECORD * capacity, -(1 << 30), np.int32)
    tiles[0] = 0
    for number, of_slot in rows.items():
        for first in range(0, len(of_slot), TILE_ROWS):
            some = of_slot[first : first + TILE_ROWS]
            at = 1 + TILE_RECORD * tiles[0]
            tiles[at : at + TILE_RECORD] = [number, len(some), *some, *[some[-1]] * (TILE_ROWS - len(some))]
            tiles[0] += 1
    return tiles
