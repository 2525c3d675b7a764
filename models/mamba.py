"""Sizes of Mamba-2 mixers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MixerNorm = Literal["gated", "read", "none"]


@dataclass(frozen=True)
class Mamba2:
    """State space mixers in some layers (blocks/mamba.py), in place of attention or `beside` it.

    layers: which. heads, head_dim: of a token's inputs. state_size: elements that each of them has in the state.
    groups: equally many neighbouring heads share the directions in which a group writes to and reads from its states;
    their results are normed together. taps: tokens that the convolution reads. conv_bias: whether it has a bias. bias:
    of the linear layer that makes them. least_step: lower bound of a head's step; 0 for none. most_step: upper bound;
    None for none. out_bias: of the last linear layer, if it differs from bias.
    norm: what the norm of results is of: "gated" ones, or what is "read" of states, before the gate; or there is none.
    norm_eps: None for that of the model. gate_scale, step_scale: factors of the gate and of steps before their bias.
    out_scale: of what the last linear layer reads.
    """

    layers: tuple[int, ...]
    heads: int
    head_dim: int
    state_size: int
    groups: int
    taps: int
    conv_bias: bool
    bias: bool
    least_step: float = 0.0
    most_step: float | None = None
    out_bias: bool | None = None
    beside: bool = False
    norm: MixerNorm = "gated"
    norm_eps: float | None = None
    gate_scale: float = 1.0
    step_scale: float = 1.0
    out_scale: float = 1.0

    @property
    def has_out_bias(self) -> bool:
        return self.bias if self.out_bias is None else self.out_bias

    @property
    def size(self) -> int:
        """Elements of a token's inputs, and of its results."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Elements of a token's inputs and of both directions of all groups."""
        return self.size + 2 * self.groups * self.state_size

    @property
    def pool_bytes(self) -> tuple[int, int]:
        """Of a KV block in the K pool: the state, float32 [heads, head_dim, state_size]; in the V pool: the inputs of
        the convolution that later tokens read, float32 [taps - 1, channels]."""
        return 4 * self.size * self.state_size, 4 * (self.taps - 1) * self.channels
