"""A scheme: how a linear layer is quantized: its weight's format and its activations' numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmc.quantize.formats.base import QuantizeError, WeightFormat


@dataclass(frozen=True)
class Scheme:
    """One choice of weight format and activation bits.

    name: as users write it. act_bits: 16 keeps activations in f32, bf16 or f16; 8 rounds them to int8 with one scale
    per token. head: the scheme of the output projection, whose errors reach the logits directly. Raises QuantizeError
    if the format cannot be multiplied by int8 activations.
    """

    name: str
    weight: WeightFormat
    act_bits: int
    head: str

    def __post_init__(self) -> None:
        if self.act_bits == 8 and self.weight.sums is None:
            raise QuantizeError(f"{self.name}: weights of {self.weight.kind} are not multiplied by int8 activations")

    def describe(self) -> str:
        """The scheme and its groups, as in `w4a8 in symmetric groups of 64`."""
        return f"{self.name} in {self.weight.describe()}"

    def with_weight(self, group_size: int | None, asymmetric: bool | None) -> Scheme:
        """This scheme with other groups; None keeps the current value. Raises QuantizeError."""
        return replace(self, weight=self.weight.regrouped(group_size, asymmetric))
