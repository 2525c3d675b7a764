"""A graph's request for a weight, and the tensors in which a target stores it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from llmc.quantize import WeightFormat
from llmc.quantize.formats.registry import format_of

COLUMNS = "columns"
"""Suffix of the column order stored beside an act-order weight: NAME.columns."""
ROWS = "rows"
"""The layout of a row-major tensor, stored as in a checkpoint."""


def kv_scales_name(layer: int) -> str:
    """Name of the scales of a layer's keys, then values, by KV head, as stated by the checkpoint."""
    return f"layers.{layer}.attention.kv_scales"


@dataclass(frozen=True)
class WeightRequest:
    """A weight that graphs use: logical shape [N, K] (any rank if not packed) and stored dtype.

    packed: in the layout of the target's linear layers. format: of a packed, quantized weight (dtype u8), whose planes
    are separate tensors. parts: number of equal parts of a packed weight, each laid out separately. columns: number of
    stored column orders, in a tensor i32 [columns K]: 0, 1, or one per expert.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    packed: bool
    format: WeightFormat | None = None
    parts: int = 1
    columns: int = 0

    def record(self) -> dict[str, Any]:
        """All of it, as JSON."""
        return {**asdict(self), "format": None if self.format is None else self.format.record()}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> WeightRequest:
        """The inverse of `record`. Raises QuantizeError."""
        format = None if record["format"] is None else format_of(record["format"])
        return cls(**{**record, "shape": tuple(record["shape"]), "format": format})


@dataclass(frozen=True)
class WeightTensor:
    """A tensor of weights.safetensors. shape: as stored. layout: the target's layout tag (FORMAT.md)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: str = ROWS
