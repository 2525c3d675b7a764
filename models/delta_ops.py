"""The llmc ops of layers with a state; `ops.py` has the others.

A state lies in a slot of its layer. All of these ops read `state_slots`, int32 [B, 3]. It has for each sequence the
slot of its state, a number of tokens, and another slot. If a sequence's first token of a step is at position 0, the
state before it is zeros, else that of its slot. The state behind its last token of the step is written there. If the
step computes the last of so many tokens of the sequence, counted from its begin, the state behind that one is also
written to the other slot. query_start i32 [B+1] and positions i32 [T] are as in `ops.paged_attention`.
"""

# torch reads op schemas from the annotations, so they must be types, not strings.

import torch
from torch import Tensor

from llmc.models.activations import activated
from llmc.models.ops import llmc_op
from llmc.models.reference import active_cache, state_tokens

NORM_EPS = 1e-6
"""Added to the sum of squares of a query or key before it is scaled to length 1."""


@llmc_op("short_conv")
def short_conv(
    x: Tensor,
    weight: Tensor,
    state_slots: Tensor,
    query_start: Tensor,
    positions: Tensor,
    layer: int,
    taps: int,
    bias: Tensor | None = None,
    activation: str = "silu",
    alone: bool = False,
) -> Tensor:
    """Convolves each of the leading C columns of x float32 [T, X] along a sequence: float32 [T, C].

    weight: float32 [taps C], the tap of a token itself last. bias: float32 [C], added to the sum. activation: what
    follows, silu or none. A sequence begins with zeros. Its last taps - 1 inputs, the oldest first, are the window of
    its slot, in the V pool; or in the K pool if alone: if the layer has no other state.
    """
    taps_of = weight.view(taps, -1)
    channels, cache = taps_of.shape[1], active_cache()
    out = x.new_empty((x.shape[0], channels))
    for tokens in state_tokens(state_slots, query_start, positions):
        rows = tokens.rows
        before = cache.state("window", layer, tokens, (taps - 1, channels))
        inputs = torch.cat((before, x[rows.start : rows.stop, :channels]))
        out[rows.start : rows.stop] = sum(inputs[tap : tap + len(rows)] * taps_of[tap] for tap in range(taps))
        for i, row in enumerate(rows):
            cache.put_state("window", layer, tokens, row, inputs[i + 1 : i + taps])
    if bias is not None:
        out = out + bias
    return out if activation == "none" else activated(out, activation)


@short_conv.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    state_slots: Tensor,
    query_start: Tensor,
    positions: Tensor,
    layer: int,
    taps: int,
    bias: Tensor | None = None,
    activation: str = "silu",
    alone: bool = False,
) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0] // taps), dtype=torch.float32)


@llmc_op("delta_rule")
def delta_rule(
    qkv: Tensor,
    gates: Tensor,
    state_slots: Tensor,
    query_start: Tensor,
    positions: Tensor,
    layer: int,
    key_heads: int,
    key_dim: int,
    tiled: bool,
) -> Tensor:
    """The gated delta rule (https://arxiv.org/abs/2412.06464) over each sequence: float32 [T, H value_dim].

    qkv: float32 [T, 2 key_heads key_dim + H value_dim]. gates: float32 [T, 2 H], for each head the strength of a write,
    then for each head what the state keeps. Equally many heads read each key head: neighbours, or if tiled every
    key_heads-th. Queries and keys are scaled to length 1, queries also by key_dim^-1/2. A sequence begins with a state
    of zeros, float32 [H, key_dim, value_dim], which lies in its slot.
    """
    heads, key_size, cache = gates.shape[1] // 2, key_heads * key_dim, active_cache()
    width = (qkv.shape[1] - 2 * key_size) // heads
    q, k, v = qkv.split([key_size, key_size, heads * width], dim=-1)
    q, k = (_of_length_1(one.view(len(qkv), key_heads, key_dim)) for one in (q, k))
    of_head = torch.arange(heads) % key_heads if tiled else torch.arange(heads) // (heads // key_heads)
    q, k = (one[:, of_head] for one in (q * key_dim**-0.5, k))
    v = v.view(len(qkv), heads, width)
    writes, kept = gates.chunk(2, dim=-1)
    out = torch.empty_like(v)
    for tokens in state_tokens(state_slots, query_start, positions):
        state = cache.state("heads", layer, tokens, (heads, key_dim, width))
        for row in tokens.rows:
            state = state * kept[row, :, None, None]
            told = torch.einsum("hkv,hk->hv", state, k[row])
            state = state + torch.einsum("hk,hv->hkv", k[row], (v[row] - told) * writes[row, :, None])
            out[row] = torch.einsum("hkv,hk->hv", state, q[row])
            cache.put_state("heads", layer, tokens, row, state)
    return out.reshape(len(qkv), heads * width)


def _of_length_1(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + NORM_EPS)


@delta_rule.register_fake
def _(
    qkv: Tensor,
    gates: Tensor,
    state_slots: Tensor,
    query_start: Tensor,
    positions: Tensor,
    layer: int,
    key_heads: int,
    key_dim: int,
    tiled: bool,
) -> Tensor:
    return qkv.new_empty((qkv.shape[0], qkv.shape[1] - 2 * key_heads * key_dim), dtype=torch.float32)
