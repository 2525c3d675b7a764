"""What graphs ask of a weight, and the tensors that a target stores it in."""

from __future__ import annotations

from dataclasses import dataclass

from llmc.quantize import WeightFormat

ROWS = "rows"
"""The layout of a tensor that lies as it does in a checkpoint, row after row."""


@dataclass(frozen=True)
class WeightRequest:
    """A weight the graphs use: logical shape [N, K] (or any rank when not packed) and stored dtype.

    packed: in the layout of the target's linear layers. format: of a packed weight that is quantized (dtype u8), with
    scales, zero points and steps in tensors of their own. parts: of a packed weight, equal ones, each laid out alone.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    packed: bool
    format: WeightFormat | None = None
    parts: int = 1


@dataclass(frozen=True)
class WeightTensor:
    """A tensor of weights.safetensors; shape: as stored. layout: the target's tag of how it lies (FORMAT.md)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: str = ROWS
