"""The parameters of a short convolution along a sequence."""

from __future__ import annotations

from torch import Tensor

from llmc.models.blocks.layers import Block, empty


class Convolution(Block):
    """weight: float32 [taps channels], for each tap those of all channels. bias: float32 [channels], or None."""

    bias: Tensor | None

    def __init__(self, channels: int, taps: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = empty(taps * channels)
        self.register_parameter("bias", empty(channels) if bias else None)
