"""Checkpoint layout of gated short convolutions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmc.models.config import ModelConfig
from llmc.models.latent_layout import Linears
from llmc.models.short_conv import ShortConv
from llmc.models.weight_map import Source, Target


@dataclass(frozen=True)
class ShortConvLayout:
    """How a checkpoint has a gated short convolution.

    block: its name in a layer. taps_only: the convolution is a matrix [channels, taps], without an axis of length 1.
    """

    block: str = "conv"
    taps_only: bool = False


SHORT_CONV_LAYOUT = ShortConvLayout()


def short_conv_targets(
    parts: Linears, config: ModelConfig, conv: ShortConv, layout: ShortConvLayout, name: str, prefix: str
) -> Iterator[Target]:
    """The parameters of `blocks.short_conv.GatedShortConv`, in order.

    name, prefix: of the layer's block, in llmc and in the checkpoint.
    """
    hidden, channels = config.hidden_size, conv.channels
    yield from parts.linear(f"{name}.inputs", (f"{prefix}.in_proj",), (3 * channels,), hidden, conv.bias)
    taps = (channels, conv.taps) if layout.taps_only else (channels, 1, conv.taps)
    weight = Source(f"{prefix}.conv.weight", (channels * conv.taps,), taps, turned=True)
    yield Target(f"{name}.convolution.weight", (weight,), "f32")
    if conv.bias:
        yield Target(f"{name}.convolution.bias", (Source(f"{prefix}.conv.bias", (channels,)),), "f32")
    yield from parts.linear(f"{name}.out", (f"{prefix}.out_proj",), (hidden,), channels, conv.bias)
