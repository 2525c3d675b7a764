"""What becomes of a linear layer: the format of its weight, and the numbers of its activations."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmc.quantize.formats.base import QuantizeError, WeightFormat


@dataclass(frozen=True)
class Scheme:
    """name: as users write it.

    act_bits: 16: activations stay as they are (f32, bf16 or f16); 8: int8 with one scale a token. head: the scheme of
    the output projection, whose errors go straight to the logits. Raises QuantizeError for a format that is not
    multiplied by int8 activations.
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
        """This scheme with other groups; None keeps what it has. Raises QuantizeError."""
        return replace(self, weight=self.weight.regrouped(group_size, asymmetric))
