"""Orders of rows and of a head's elements in which checkpoints differ from llmc."""

from __future__ import annotations

import numpy as np

from llmc.models.config import ModelConfig
from llmc.models.rotary import Rope
from llmc.models.weight_map import Rows


def by_group(config: ModelConfig) -> Rows:
    """`Layout.qkv_rows` for checkpoints grouped by key head: its query heads, then k, then v.

    Without grouped queries, this interleaves q, k and v by head.
    """
    assert config.full_heads is None
    per_group = config.num_heads // config.num_kv_heads
    heads = np.arange(config.num_kv_heads * (per_group + 2)).reshape(config.num_kv_heads, per_group + 2)
    order = np.concatenate((heads[:, :-2].ravel(), heads[:, -2], heads[:, -1]))
    return heads_to_rows(order, config.head_dim)


def heads_to_rows(heads: np.ndarray, head_dim: int) -> Rows:
    """The rows of heads, in the given order of heads."""
    return (heads[:, None] * head_dim + np.arange(head_dim)).ravel().astype(np.int32)


def halved(config: ModelConfig) -> np.ndarray:
    """The element order of a head that places rotated neighbours half the rotated part apart."""
    dim = config.rope.dim
    return np.concatenate((np.arange(0, dim, 2), np.arange(1, dim, 2), np.arange(dim, config.head_dim)))


def rotated_first(rope: Rope, head_dim: int) -> np.ndarray | None:
    """The element order of a head that places rotated elements first, where they are half a head apart; None if they
    are first."""
    if not rope.moved_pairs:
        return None
    pairs = np.arange(head_dim).reshape(2, -1)
    return np.concatenate((pairs[:, : rope.moved_pairs].ravel(), pairs[:, rope.moved_pairs :].ravel()))
