"""The attention ops that torch computes, against the code of the models that they are of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as with_cap
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as with_sinks

from llmc.models import ops
from llmc.models.reference import ReferenceCache, use_cache

HEADS, KV_HEADS, DIM, TOKENS = 6, 2, 8, 21
CHUNK, WINDOW = 5, 4


def random(*shape: int, seed: int) -> Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def attended(**more: Any) -> Tensor:
    """float32 [H, T, hd] of a sequence of random keys, values and queries."""
    cache = ReferenceCache([(KV_HEADS, DIM)], 3, 16)
    at = torch.arange(TOKENS, dtype=torch.int32)
    cache.write(0, at + 16, random(TOKENS, KV_HEADS, DIM, seed=1), random(TOKENS, KV_HEADS, DIM, seed=2))
    q = random(TOKENS, HEADS * DIM, seed=3)
    table, zeros = torch.tensor([[1, 2]], dtype=torch.int32), torch.zeros_like(at)
    lens, starts = torch.tensor([TOKENS]), torch.tensor([0, TOKENS])
    with use_cache(cache):
        sizes = (0, HEADS, KV_HEADS, DIM, DIM**-0.5, more.pop("window", 0))
        out = ops.paged_attention(q, table, lens, starts, zeros, at, *sizes, **more)
    return out.view(TOKENS, HEADS, DIM).transpose(0, 1)


def of_transformers(forward: Any, first: Tensor, sinks: Tensor | None = None, **more: Any) -> Tensor:
    """The same by the code of a model; first: key that each token sees first."""
    keys, values = (random(TOKENS, KV_HEADS, DIM, seed=s).transpose(0, 1)[None] for s in (1, 2))
    at = torch.arange(TOKENS)
    seen = (at <= at[:, None]) & (at >= first[:, None])
    mask = torch.zeros(TOKENS, TOKENS).masked_fill(~seen, float("-inf"))
    module = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, training=False, sinks=sinks, head_dim=DIM)
    q = random(TOKENS, HEADS * DIM, seed=3).view(TOKENS, HEADS, DIM).transpose(0, 1)[None]
    out: Tensor = forward(module, q, keys, values, mask, scaling=DIM**-0.5, **more)[0]
    return out[0].transpose(0, 1)


AT = torch.arange(TOKENS)


@pytest.mark.parametrize("sinks", [random(HEADS, seed=4), random(HEADS, seed=4) + 40, random(HEADS, seed=4) - 90])
@pytest.mark.parametrize(
    ("limits", "first"),
    [({}, 0 * AT), ({"window": WINDOW}, AT - WINDOW + 1), ({"chunk": CHUNK}, AT // CHUNK * CHUNK)],
    ids=["all", "window", "chunk"],
)
def test_sinks(sinks: Tensor, limits: dict[str, int], first: Tensor) -> None:
    expected = of_transformers(with_sinks, first, sinks)
    torch.testing.assert_close(attended(sinks=sinks, **limits), expected, rtol=1e-5, atol=1e-6)


def test_cap() -> None:
    torch.testing.assert_close(attended(score_cap=1.5), of_transformers(with_cap, 0 * AT, softcap=1.5))
