"""Rotary positions of a configuration: their frequencies, how these are scaled, and which axis each follows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies. A field that the type does not use is None (truncate: True).

    rope_type: "linear", "dynamic", "llama3", "yarn", "longrope", "ntk_steps", "proportional", or "factors" from a GGUF
    file, which divide each frequency. original_max_position_embeddings: tokens of the pretraining context.
    attention_factor, mscale, mscale_all_dim: scale of cos and sin, resolved in `rope.py`. frequency_factors: divisors
    of the frequencies; in longrope for texts within the original context. long_factors: for longer ones. head_dim: in
    proportional, the elements of a head. Its frequencies are the first of a whole head's, and rotated elements are
    pairs half a head apart; ours come first in a head (`row_orders.rotated_first`).
    """

    rope_type: str
    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    frequency_factors: tuple[float, ...] | None = None
    long_factors: tuple[float, ...] | None = None
    head_dim: int | None = None


@dataclass(frozen=True)
class Rope:
    """Rotary positions. theta: base of the frequencies; None for no rotation. dim: number of leading elements of a head
    that are rotated; even. axes: of a model that sees images, a digit for each frequency: the axis of a position
    that it follows (0 time, 1 height, 2 width); empty for models whose positions have one axis."""

    theta: float | None
    dim: int
    scaling: RopeScaling | None = None
    axes: str = ""

    @property
    def moved_pairs(self) -> int:
        """Rotated pairs whose elements are half a head apart in checkpoints, and come first in ours; 0 for none."""
        moves = self.scaling is not None and self.scaling.head_dim not in (None, self.dim)
        return self.dim // 2 if moves else 0


NO_ROPE = Rope(None, 2)
"""For layers and models without rotary positions."""
