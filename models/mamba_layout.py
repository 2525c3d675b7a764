"""Checkpoint layout of Mamba-2 mixers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from llmc.models.config import ModelConfig
from llmc.models.delta_layout import decay
from llmc.models.latent_layout import Linears
from llmc.models.mamba import Mamba2
from llmc.models.weight_map import Rows, Source, Target


@dataclass(frozen=True)
class MambaLayout:
    """How a checkpoint has a Mamba-2 mixer.

    block: its name in a layer. taps_only: the convolution is a matrix [channels, taps], without an axis of length 1.
    decays: the file has the decays themselves, not their logarithms. columns: decays and skips are matrices of one
    column. normed_groups: the norm is a matrix with a row for each group.
    """

    block: str = "mamba"
    taps_only: bool = False
    decays: bool = False
    columns: bool = False
    normed_groups: bool = False


MAMBA_LAYOUT = MambaLayout()


def mamba_targets(
    parts: Linears, config: ModelConfig, net: Mamba2, layout: MambaLayout, name: str, prefix: str
) -> Iterator[Target]:
    """The parameters of `blocks.mamba.Mamba2Mixer`, in order.

    name, prefix: of the layer's mixer, in llmc and in the checkpoint.
    """
    hidden, heads, channels = config.hidden_size, net.heads, net.channels
    inputs, rows = (net.size + channels + heads,), _gate_behind_channels(net)
    yield from parts.linear(f"{name}.inputs", (f"{prefix}.in_proj",), inputs, hidden, net.bias, rows=rows)
    taps = (channels, net.taps) if layout.taps_only else (channels, 1, net.taps)
    convolution = Source(f"{prefix}.conv1d.weight", (channels * net.taps,), taps, turned=True)
    yield Target(f"{name}.convolution.weight", (convolution,), "f32")
    if net.conv_bias:
        yield Target(f"{name}.convolution.bias", (Source(f"{prefix}.conv1d.bias", (channels,)),), "f32")
    column = (heads, 1) if layout.columns else None
    of_decays = None if layout.decays else decay
    yield Target(f"{name}.decay", (Source(f"{prefix}.A_log", (heads,), column),), "f32", of_rows=of_decays)
    yield Target(f"{name}.step_bias", (Source(f"{prefix}.dt_bias", (heads,)),), "f32")
    yield Target(f"{name}.skip", (Source(f"{prefix}.D", (heads,), column),), "f32")
    groups = (net.groups, net.size // net.groups) if layout.normed_groups else None
    if net.norm != "none":
        yield Target(f"{name}.norm.weight", (Source(f"{prefix}.norm.weight", (net.size,), groups),), "f32")
    yield from parts.linear(f"{name}.out", (f"{prefix}.out_proj",), (hidden,), net.size, net.has_out_bias)


def _gate_behind_channels(net: Mamba2) -> Rows:
    """The row order that gives the channels of the convolution, the gate, then the steps; checkpoints have the gate
    first."""
    gate, channels, steps = np.split(
        np.arange(net.size + net.channels + net.heads, dtype=np.int32), (net.size, net.size + net.channels)
    )
    return np.concatenate((channels, gate, steps))
