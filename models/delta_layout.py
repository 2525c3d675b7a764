"""Checkpoint layout of gated delta nets: those of Qwen's models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmc.models.config import ModelConfig
from llmc.models.delta_net import DeltaNet
from llmc.models.latent_layout import Linears
from llmc.models.weight_map import Rows, Source, Target


@dataclass(frozen=True)
class DeltaLayout:
    """How a checkpoint has a gated delta net.

    block: its name in a layer. inputs: matrices of queries, keys and values, and of the gate. gates: matrices of
    writes and of decays. One name in place of two: the rows of both lie side by side for each key head.
    taps_only: the convolution is a matrix [channels, taps], without an axis of length 1. decays: the file has the
    decays themselves, not their logarithms.
    """

    block: str = "linear_attn"
    inputs: tuple[str, ...] = ("in_proj_qkv", "in_proj_z")
    gates: tuple[str, ...] = ("in_proj_b", "in_proj_a")
    taps_only: bool = False
    decays: bool = False


DELTA_LAYOUT = DeltaLayout()


def delta_targets(
    parts: Linears, config: ModelConfig, net: DeltaNet, layout: DeltaLayout, name: str, prefix: str
) -> Iterator[Target]:
    """The parameters of `blocks.delta_net.GatedDeltaNet`, in order.

    name, prefix: of the layer's net, in llmc and in the checkpoint.
    """
    hidden, heads = config.hidden_size, net.value_heads
    inputs, gates = (net.channels, net.value_size), (heads, heads)

    def at(*names: str) -> tuple[str, ...]:
        return tuple(f"{prefix}.{n}" for n in names)

    def order(names: tuple[str, ...], *of_head: int) -> Rows | None:
        return _parted(net, of_head) if len(names) == 1 else None

    per_key = heads // net.key_heads
    rows = order(layout.inputs, net.key_dim, net.key_dim, *(per_key * net.value_dim,) * 2)
    yield from parts.linear(f"{name}.inputs", at(*layout.inputs), inputs, hidden, False, rows=rows)
    rows = order(layout.gates, per_key, per_key)
    yield from parts.linear(f"{name}.gates", at(*layout.gates), gates, hidden, False, rows=rows, precise=True)
    taps = (net.channels, net.taps) if layout.taps_only else (net.channels, 1, net.taps)
    convolution = Source(f"{prefix}.conv1d.weight", (net.channels * net.taps,), taps, turned=True)
    yield Target(f"{name}.convolution.weight", (convolution,), "f32")
    of_decays = None if layout.decays else decay
    yield Target(f"{name}.decay", (Source(f"{prefix}.A_log", (heads,)),), "f32", of_rows=of_decays)
    yield Target(f"{name}.step_bias", (Source(f"{prefix}.dt_bias", (heads,)),), "f32")
    yield Target(f"{name}.norm.weight", (Source(f"{prefix}.norm.weight", (net.value_dim,)),), "f32")
    yield from parts.linear(f"{name}.out", at("out_proj"), (hidden,), net.value_size, False)


def _parted(net: DeltaNet, of_head: tuple[int, ...]) -> Rows:
    """The row order that gives all of each part in turn. of_head: rows of each part of a key head."""
    rows = np.arange(net.key_heads * sum(of_head), dtype=np.int32).reshape(net.key_heads, -1)
    return np.concatenate([part.ravel() for part in np.split(rows, np.cumsum(of_head)[:-1], axis=1)])


def decay(logarithms: NDArray[np.float32]) -> NDArray[np.float32]:
    """Of heads, from the logarithms of its negative."""
    return -np.exp(logarithms)
