"""Layout of a LoRA adapter's matrices in a slot of a linear layer's pool (FORMAT.md), for compiler and runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmc.graphs_format import ALIGNMENT, MAX_ADAPTER_PARTS

HEADER_BYTES = 8 * MAX_ADAPTER_PARTS
"""Per part: the rank of its adapter (int32, 0: none) and the scale (float32)."""
ITEM_BYTES: Mapping[str, int] = {"f32": 4, "bf16": 2, "f16": 2}

EXPERT_UNIT = 16
"""In a pool of experts, an expert's columns of A and rows of B begin at a multiple of this."""


def padded(count: int) -> int:
    """Columns or rows that one expert takes in a pool of experts."""
    return _up(count, EXPERT_UNIT)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class AdapterSlot:
    """Slot of a layer with `columns` inputs and `rows` outputs per part, for adapter ranks up to `rank`.

    tile_rows, tile_columns: matrices are stored in tiles. A is `[ceil(r / tile_rows)][ceil(columns / tile_columns)]
    [tile_rows][tile_columns]`, B of a part is `[ceil(rows / tile_rows)][ceil(r / tile_columns)][tile_rows]
    [tile_columns]`, where r is the adapter's own rank.
    item_bytes: bytes of a number.
    """

    columns: int
    rows: tuple[int, ...]
    rank: int
    tile_rows: int
    tile_columns: int
    item_bytes: int

    @property
    def layout(self) -> tuple[int, int, int, int]:
        """columns, tile_rows, tile_columns and the number of parts, as stored in graphs.bin."""
        return self.columns, self.tile_rows, self.tile_columns, len(self.rows)

    @property
    def counted_bytes(self) -> int:
        """Unit in which kernels address a slot: bytes of a number, or of a word of several numbers."""
        return self.item_bytes * self.tile_columns

    @property
    def shrunk_width(self) -> int:
        """Floats that A of one part computes per row, in whole tiles."""
        return _up(self.rank, self.tile_rows)

    @property
    def a_bytes(self) -> int:
        """Bytes reserved for A of one part."""
        words = _up(self.columns, self.tile_columns)
        return _up(_up(self.rank, self.tile_rows) * words * self.item_bytes, ALIGNMENT)

    def b_bytes(self, part: int) -> int:
        """Bytes reserved for B of a part."""
        return _up(
            _up(self.rows[part], self.tile_rows) * _up(self.rank, self.tile_columns) * self.item_bytes, ALIGNMENT
        )

    def a_offset(self, part: int) -> int:
        """Byte offset of a part's A in a slot."""
        return HEADER_BYTES + part * self.a_bytes

    def b_offset(self, part: int) -> int:
        """Byte offset of a part's B in a slot."""
        return self.a_offset(len(self.rows)) + sum(self.b_bytes(i) for i in range(part))

    @property
    def bytes(self) -> int:
        return self.b_offset(len(self.rows))
