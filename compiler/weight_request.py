"""What graphs ask of a weight, and the tensors that a target stores it in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from llmc.quantize import WeightFormat
from llmc.quantize.formats.registry import format_of

COLUMNS = "columns"
"""What is stored beside a weight in act-order: NAME.columns."""
ROWS = "rows"
"""The layout of a tensor that lies as it does in a checkpoint, row after row."""


def kv_scales_name(layer: int) -> str:
    """The scales of a layer's keys, then of its values, a KV head after the other, where the checkpoint states them."""
    return f"layers.{layer}.attention.kv_scales"


@dataclass(frozen=True)
class WeightRequest:
    """A weight the graphs use: logical shape [N, K] (or any rank when not packed) and stored dtype.

    packed: in the layout of the target's linear layers. format: of a packed weight that is quantized (dtype u8), with
    what lies beside its numbers in tensors of their own. parts: of a packed weight, equal ones, each laid out alone.
    columns: orders of its columns that are stored too, in a tensor i32 [columns K]: one, one an expert, or 0.
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
        """The request whose `record()` it is. Raises QuantizeError."""
        format = None if record["format"] is None else format_of(record["format"])
        return cls(**{**record, "shape": tuple(record["shape"]), "format": format})


@dataclass(frozen=True)
class WeightTensor:
    """A tensor of weights.safetensors; shape: as stored. layout: the target's tag of how it lies (FORMAT.md)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: str = ROWS
