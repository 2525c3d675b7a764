"""The llmc ops of latent attention; `ops.py` has the others. R elements of a latent vector, P of the rotated key."""

# torch reads op schemas from the annotations, so they must be types, not strings.

import torch
from torch import Tensor

from llmc.models.ops import llmc_op, normalised, rotated, torch_act_dtype
from llmc.models.reference import active_cache


@llmc_op("head_linear")
def head_linear(x: Tensor, weight: Tensor, num_heads: int) -> Tensor:
    """Multiplies the leading K elements of each head of x float32 [T, H S] by the head's own matrix in weight [H N, K]:
    float32 [T, H N]."""
    heads = x.float().view(x.shape[0], num_heads, -1)[..., : weight.shape[1]]
    matrices = weight.float().view(num_heads, -1, weight.shape[1])
    return torch.einsum("thk,hnk->thn", heads, matrices).reshape(x.shape[0], weight.shape[0])


@head_linear.register_fake
def _(x: Tensor, weight: Tensor, num_heads: int) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32)


@llmc_op("packed_head_linear")
def packed_head_linear(x: Tensor, weight: Tensor, num_heads: int, act_dtype: str = "f32") -> Tensor:
    """As `head_linear`, packed for a linear: act [T, H N]."""
    return head_linear(x, weight, num_heads).to(torch_act_dtype(act_dtype))


@packed_head_linear.register_fake
def _(x: Tensor, weight: Tensor, num_heads: int, act_dtype: str = "f32") -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch_act_dtype(act_dtype))


@llmc_op("latent_kv_write")
def latent_kv_write(
    q: Tensor,
    kv: Tensor,
    norm: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    layer: int,
    num_heads: int,
    norm_eps: float,
) -> Tensor:
    """Rotates the last P elements of each head of q float32 [T, H S], and of kv float32 [T, R + P], by cos_sin
    [max_len, P]. Returns q's rotated elements, float32 [T, H P].

    Writes each token's key to the layer's slots: the first R elements of kv, normed with norm [R], then the rotated
    ones.
    """
    rank, size = norm.shape[0], cos_sin.shape[1]
    cos, sin = cos_sin[positions.long()].unsqueeze(1).chunk(2, dim=-1)
    latent = normalised(kv[:, :rank].float(), norm, norm_eps)
    key = torch.cat((latent.unsqueeze(1), rotated(kv[:, None, rank:].float(), cos, sin)), dim=-1)
    active_cache().write(layer, slot_mapping, key, key)
    heads = q.float().view(q.shape[0], num_heads, -1)[..., -size:]
    return rotated(heads, cos, sin).reshape(q.shape[0], num_heads * size)


@latent_kv_write.register_fake
def _(
    q: Tensor,
    kv: Tensor,
    norm: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    layer: int,
    num_heads: int,
    norm_eps: float,
) -> Tensor:
    return q.new_empty((q.shape[0], num_heads * cos_sin.shape[1]), dtype=torch.float32)


@llmc_op("latent_attention")
def latent_attention(
    q: Tensor,
    q_rotated: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_start: Tensor,
    token_seq: Tensor,
    positions: Tensor,
    layer: int,
    num_heads: int,
    scale: float,
) -> Tensor:
    """Causal attention of queries, float32 [T, H R] and [T, H P], to one key per token of the sequence. A key has R + P
    elements; the first R are its value. Returns float32 [T, H R].

    Other arguments: as in `ops.paged_attention`.
    """
    tokens = q.shape[0]
    heads = torch.cat((q.view(tokens, num_heads, -1), q_rotated.view(tokens, num_heads, -1)), dim=-1).float()
    rank = q.shape[1] // num_heads
    out = q.new_empty((tokens, num_heads, rank), dtype=torch.float32)
    for seq in token_seq.unique().tolist():
        rows = (token_seq == seq).nonzero().squeeze(1)
        keys = active_cache().read(layer, block_tables[seq], int(context_lens[seq]))[0][:, 0]
        seen = torch.arange(len(keys)) <= positions[rows].long()[:, None]
        scores = torch.einsum("thd,sd->hts", heads[rows], keys) * scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        out[rows] = torch.einsum("hts,sd->thd", weights, keys[:, :rank])
    return out.view(q.shape)


@latent_attention.register_fake
def _(
    q: Tensor,
    q_rotated: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_start: Tensor,
    token_seq: Tensor,
    positions: Tensor,
    layer: int,
    num_heads: int,
    scale: float,
) -> Tensor:
    return q.new_empty(q.shape, dtype=torch.float32)
