"""Sizes of gated short convolutions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ShortConv:
    """Gated short convolutions in place of attention in some layers (blocks/short_conv.py).

    layers: which. channels: elements of a token that are convolved. taps: tokens that the convolution reads. bias:
    whether the convolution and the linears around it have biases.
    """

    layers: tuple[int, ...]
    channels: int
    taps: int
    bias: bool = False

    @property
    def pool_bytes(self) -> tuple[int, int]:
        """Of a KV block in the K and the V pool: the inputs that later tokens read, float32 [taps - 1, channels]."""
        return 4 * (self.taps - 1) * self.channels, 0
