"""Schemes by exact name: the numbers that a linear layer's weight is stored in, and those of its activations."""

from __future__ import annotations

from dataclasses import dataclass, replace

SCALE, ZERO, STEP = ".scale", ".zero", ".step"
"""What the tensors of a quantized weight are called after its numbers' name."""
WHOLE_ROW = -1
"""The group size of a weight with one scale an output channel."""


class QuantizeError(ValueError):
    """A request for quantization that cannot be met; the message says what to do."""


@dataclass(frozen=True)
class WeightFormat:
    """How a matrix [N, K] is stored: unsigned numbers, and a scale for each group of them along K.

    value = (number - zero) * scale. bits: 8 or 4. group_size: elements of a row that share a scale, a multiple of 32,
    or WHOLE_ROW. asymmetric: a zero point is stored beside each scale; otherwise it is the middle of the range.

    steps: value = (number - zero) * step * scale, with one scale a row: a group of 4-bit numbers has a step of 1 … 15
    and a zero point of 0 … 15, in one byte, so that (number - zero) * step is an int8 and a sum over all of K exact
    (progressive quantization of groups: QServe, arXiv 2405.04532).
    """

    bits: int
    group_size: int = WHOLE_ROW
    asymmetric: bool = False
    steps: bool = False

    @property
    def middle(self) -> int:
        """The zero point of a symmetric format: 128 or 8."""
        return 1 << (self.bits - 1)

    @property
    def of_group(self) -> str:
        """What a byte is stored of for each group: "zero", "step" (step + 16 zero), or nothing."""
        return "step" if self.steps else "zero" if self.asymmetric else ""

    @property
    def sums(self) -> WeightFormat:
        """The format in whose groups, and by whose factor, int8 activations are summed: bytes of steps are int8."""
        return WeightFormat(8) if self.steps else self

    @property
    def sum_factor(self) -> int:
        """What kernels that sum numbers, not values, multiply the sum of a group's activations by: minus the zero
        point, or -1 where each group has its own.
        """
        return -1 if self.asymmetric else -self.middle

    def groups(self, k: int) -> int:
        """Groups of a row of `k` elements; the last one may be short."""
        return 1 if self.group_size == WHOLE_ROW else -(-k // self.group_size)

    def scales(self, k: int) -> int:
        """Scales of a row of `k` elements."""
        return 1 if self.steps else self.groups(k)

    def bits_per_weight(self, k: int) -> float:
        """Bits an element, scales (32 bits) and bytes of groups included."""
        return self.bits + (32 * self.scales(k) + (8 * self.groups(k) if self.of_group else 0)) / k


@dataclass(frozen=True)
class Scheme:
    """What becomes of a linear layer. name: as users write it.

    act_bits: 16: activations stay as they are (bf16 or f32); 8: int8 with one scale a token. head: the scheme of the
    output projection, whose errors go straight to the logits.
    """

    name: str
    weight: WeightFormat
    act_bits: int
    head: str

    def describe(self) -> str:
        """The scheme and its groups, as in `w4a8 in symmetric groups of 64`."""
        if self.weight.group_size == WHOLE_ROW:
            groups = "channels"
        else:
            groups = f"groups of {self.weight.group_size}"
        return f"{self.name} in {'asymmetric' if self.weight.asymmetric else 'symmetric'} {groups}"

    def with_weight(self, group_size: int | None, asymmetric: bool | None) -> Scheme:
        """This scheme with other groups; None keeps what it has. Raises QuantizeError."""
        if group_size is None and asymmetric is None:
            return self
        if self.weight.bits != 4:
            what = "--group-size" if group_size is not None else "--symmetric and --asymmetric"
            raise QuantizeError(
                f"{what} cannot be combined with {self.name}, which has one scale an output channel; leave it out or "
                f"use w4a16 or w4a8"
            )
        if group_size is not None and group_size not in GROUP_SIZES:
            raise QuantizeError(f"group size {group_size} is not one of {', '.join(map(str, GROUP_SIZES))}")
        weight = replace(
            self.weight,
            group_size=self.weight.group_size if group_size is None else group_size,
            asymmetric=self.weight.asymmetric if asymmetric is None else asymmetric,
        )
        return replace(self, weight=weight)


GROUP_SIZES = (32, 64, 128, WHOLE_ROW)
_INT8, _INT4, _STEPS = WeightFormat(8), WeightFormat(4, 64), WeightFormat(4, 64, steps=True)
SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("w8a16", _INT8, 16, head="w8a16"),
        Scheme("w8a8", _INT8, 8, head="w8a8"),
        Scheme("w4a16", _INT4, 16, head="w8a16"),
        Scheme("w4a8", _STEPS, 8, head="w8a8"),
    )
}


def get_scheme(name: str) -> Scheme:
    """The scheme called `name`. Raises QuantizeError naming the known ones."""
    if name not in SCHEMES:
        raise QuantizeError(f"quantization scheme {name!r} is unknown: use {', '.join(SCHEMES)}")
    return SCHEMES[name]
