"""How the matrices of a LoRA adapter lie in a slot of a linear layer's pool (FORMAT.md), for compiler and runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmc.graphs_format import ALIGNMENT, MAX_ADAPTER_PARTS

HEADER_BYTES = 8 * MAX_ADAPTER_PARTS
"""For each part the rank of its adapter, int32, 0: none, and the scale, float32."""
ITEM_BYTES: Mapping[str, int] = {"f32": 4, "bf16": 2, "f16": 2}


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class AdapterSlot:
    """Of a layer with `columns` inputs, whose outputs are `rows` of each part, for ranks up to `rank`.

    panel, lanes: A lies as `[ceil(r / panel)][ceil(columns / lanes)][panel][lanes]`, B of a part as
    `[ceil(rows / panel)][ceil(r / lanes)][panel][lanes]`, r the adapter's own rank. item_bytes: of a number.
    """

    columns: int
    rows: tuple[int, ...]
    rank: int
    panel: int
    lanes: int
    item_bytes: int

    @property
    def layout(self) -> tuple[int, int, int, int]:
        """columns, panel, lanes and the number of parts, as graphs.bin has them."""
        return self.columns, self.panel, self.lanes, len(self.rows)

    @property
    def counted_bytes(self) -> int:
        """Of what kernels count in a slot: a number, or a word of several."""
        return self.item_bytes * self.lanes

    @property
    def shrunk_width(self) -> int:
        """Floats that A of one part makes of a row, in whole panels."""
        return _up(self.rank, self.panel)

    @property
    def a_bytes(self) -> int:
        """Room for A of one part."""
        words = _up(self.columns, self.lanes)
        return _up(_up(self.rank, self.panel) * words * self.item_bytes, ALIGNMENT)

    def b_bytes(self, part: int) -> int:
        """Room for B of a part."""
        return _up(_up(self.rows[part], self.panel) * _up(self.rank, self.lanes) * self.item_bytes, ALIGNMENT)

    def a_offset(self, part: int) -> int:
        """Byte of a slot where A of a part begins."""
        return HEADER_BYTES + part * self.a_bytes

    def b_offset(self, part: int) -> int:
        """Byte of a slot where B of a part begins."""
        return self.a_offset(len(self.rows)) + sum(self.b_bytes(i) for i in range(part))

    @property
    def bytes(self) -> int:
        return self.b_offset(len(self.rows))
