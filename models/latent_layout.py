"""Checkpoint layout of latent attention: all checkpoints use DeepSeek's names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from llmc.models.config import Latent, ModelConfig
from llmc.models.weight_map import HeadPart, Rows, Source, Target


class Linears(Protocol):
    """Makes the targets of a linear layer; implemented in `layout.py`."""

    def linear(
        self,
        target: str,
        sources: tuple[str, ...],
        sizes: tuple[int, ...],
        columns: int,
        bias: bool,
        *,
        rows: Rows | None = None,
        precise: bool = False,
    ) -> Iterator[Target]: ...


def latent_targets(
    parts: Linears, config: ModelConfig, latent: Latent, name: str, prefix: str, *, parted: bool
) -> Iterator[Target]:
    """The parameters of `blocks.latent.LatentAttention`, in order.

    name, prefix: of the layer's attention, in llmc and in the checkpoint. parted: kv_b_proj is stored as two matrices
    per head, [rank, plain_dim] and [value_dim, rank].
    """
    heads, hidden = config.num_heads, config.hidden_size

    def norm(target: str, source: str, size: int) -> Target:
        return Target(f"{name}.{target}.weight", (Source(f"{prefix}.{source}.weight", (size,)),), "f32")

    queries, rows = (heads * latent.query_dim,), _paired(latent, heads, latent.plain_dim)
    if latent.query_rank is None:
        yield from parts.linear(f"{name}.q", (f"{prefix}.q_proj",), queries, hidden, False, rows=rows)
    else:
        rank = latent.query_rank
        yield from parts.linear(f"{name}.q_a", (f"{prefix}.q_a_proj",), (rank,), hidden, config.attention_bias)
        yield norm("q_norm", "q_a_layernorm", rank)
        yield from parts.linear(f"{name}.q", (f"{prefix}.q_b_proj",), queries, rank, False, rows=rows)
    source, rows = (f"{prefix}.kv_a_proj_with_mqa",), _paired(latent, 1, latent.rank)
    yield from parts.linear(f"{name}.kv", source, (latent.key_dim,), hidden, config.attention_bias, rows=rows)
    yield norm("kv_norm", "kv_a_layernorm", latent.rank)
    yield from _ups(name, prefix, heads, latent, parted=parted)
    out = (f"{prefix}.o_proj",)
    yield from parts.linear(f"{name}.out", out, (hidden,), heads * latent.value_dim, config.o_bias)


def _ups(name: str, prefix: str, heads: int, latent: Latent, *, parted: bool) -> Iterator[Target]:
    """The matrices that make keys and values from latent vectors."""
    plain, value, rank = latent.plain_dim, latent.value_dim, latent.rank
    if parted:
        for target, source, rows, columns in (
            ("key_up", "k_b_proj", rank, plain),
            ("value_up", "v_b_proj", value, rank),
        ):
            matrix = Source(f"{prefix}.{source}.weight", (heads * rows, columns))
            yield Target(f"{name}.{target}.weight", (matrix,), "act", precise=True)
        return
    both = (Source(f"{prefix}.kv_b_proj.weight", (heads * (plain + value), rank)),)
    for target, part in (
        ("key_up", HeadPart(plain + value, 0, plain, turned=True)),
        ("value_up", HeadPart(plain + value, plain, value)),
    ):
        yield Target(f"{name}.{target}.weight", both, "act", precise=True, part=part)


def _paired(latent: Latent, heads: int, before: int) -> Rows | None:
    """Row order for heads with `before` plain rows, then rotated ones: neighbouring pairs become half-split."""
    if not latent.interleaved:
        return None
    rotated = before + np.arange(latent.rotated_dim)
    of_head = np.concatenate((np.arange(before), rotated[0::2], rotated[1::2]))
    rows: Rows = (np.arange(heads)[:, None] * len(of_head) + of_head).ravel().astype(np.int32)
    return rows
