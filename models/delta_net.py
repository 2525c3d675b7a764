"""Sizes of gated delta nets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta nets in place of attention in some layers (blocks/delta_net.py).

    layers: which. key_heads, value_heads: equally many value heads read each key head: neighbours, or if tiled every
    key_heads-th. key_dim, value_dim: elements of one. taps: tokens that the convolution of queries, keys and values
    reads.
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    tiled: bool = False

    @property
    def key_size(self) -> int:
        """Elements of a token's keys, and of its queries."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Elements of a token's values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Elements of a token's queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def pool_bytes(self) -> tuple[int, int]:
        """Of a KV block in the K pool: the state, float32 [value_heads, key_dim, value_dim]; in the V pool: the
        inputs of the convolution that later tokens read, float32 [taps - 1, channels]."""
        return 4 * self.value_size * self.key_dim, 4 * (self.taps - 1) * self.channels
