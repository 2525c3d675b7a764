"""The llmc ops, used by models in addition to plain torch; each compiles to a kernel template.

The eager implementations are references: float32 arithmetic, with activations rounded where kernels round them.
T tokens, S samples, B sequences, D hidden size, H and Hkv query and KV heads, hd head_dim. The argument `act_dtype`,
"f32", "bf16" or "f16", is the dtype of an activation that feeds a linear; eager code does not pack it.
"""

# torch reads op schemas from the annotations, so they must be types, not strings.

from collections.abc import Callable
from typing import ParamSpec, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from llmc.models.activations import activated
from llmc.models.reference import active_cache

_ACT_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
_P = ParamSpec("_P")


class _Op(Protocol[_P]):
    """A torch.library op, with the types that torch's own class lacks."""

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> Tensor: ...

    def register_fake(self, fn: Callable[_P, Tensor], /) -> Callable[_P, Tensor]: ...


def llmc_op(name: str) -> Callable[[Callable[_P, Tensor]], _Op[_P]]:
    """Registers a function as the eager implementation of a functional op."""
    return torch.library.custom_op(f"llmc::{name}", mutates_args=())


def torch_act_dtype(act_dtype: str) -> torch.dtype:
    """torch dtype of "f32", "bf16" or "f16". Raises ValueError on another name."""
    if act_dtype not in _ACT_DTYPES:
        raise ValueError(f"activation dtype {act_dtype!r} is not one of {', '.join(_ACT_DTYPES)}")
    return _ACT_DTYPES[act_dtype]


def normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis, float32."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


@llmc_op("embedding")
def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of `weight` [V, D] selected by ids i32 [T]: float32 [T, D]."""
    return weight[ids.long()].float()


@embedding.register_fake
def _(ids: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty((ids.shape[0], weight.shape[1]), dtype=torch.float32)


@llmc_op("rms_norm")
def rms_norm(x: Tensor, weight: Tensor, eps: float, act_dtype: str = "f32") -> Tensor:
    """x float32 [T, D] divided by its root mean square, times weight [D]: act [T, D]."""
    return normalised(x.float(), weight, eps).to(torch_act_dtype(act_dtype))


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float, act_dtype: str = "f32") -> Tensor:
    return x.new_empty(x.shape, dtype=torch_act_dtype(act_dtype))


@llmc_op("linear")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """x act [T, K] · weightᵀ, weight [N, K], plus bias [N], plus residual [T, N]: float32 [T, N]."""
    out = F.linear(x.float(), weight.float())
    if bias is not None:
        out = out + bias.float()
    if residual is not None:
        out = out + residual
    return out


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32)


@llmc_op("gated_linear")
def gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, act_dtype: str = "f32", activation: str = "silu"
) -> Tensor:
    """activation(gate) · up, both linear in x act [T, K]; weight [2 I, K] and bias [2 I], gate first: act [T, I]."""
    gate, up = linear(x, weight, bias).chunk(2, dim=-1)
    return (activated(gate, activation) * up).to(torch_act_dtype(act_dtype))


@gated_linear.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, act_dtype: str = "f32", activation: str = "silu"
) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0] // 2), dtype=torch_act_dtype(act_dtype))


@llmc_op("activated_linear")
def activated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, act_dtype: str = "f32", activation: str = "silu"
) -> Tensor:
    """activation(x act [T, K] · weightᵀ + bias), weight [N, K], bias [N]: act [T, N]."""
    return activated(linear(x, weight, bias), activation).to(torch_act_dtype(act_dtype))


@activated_linear.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, act_dtype: str = "f32", activation: str = "silu"
) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch_act_dtype(act_dtype))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the leading elements of heads [T, heads, hd] by angles [T, 1, rotary_dim / 2]."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


@llmc_op("rope_kv_write")
def rope_kv_write(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    layer: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    norm_eps: float,
    norm_rotated: bool = False,
) -> Tensor:
    """Splits qkv float32 [T, (H + 2 Hkv) hd], norms, rotates and caches. Returns q float32 [T, H hd].

    Norms q and k per head with q_norm and k_norm [hd], if given; rotates them by cos_sin [max_len, rotary_dim]; writes
    k and v to the layer's slots. norm_rotated: norm after rotation, without weights if none are given. With
    num_kv_heads 0, qkv is q alone.
    """
    heads = qkv.float().view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    cos, sin = cos_sin[positions.long()].unsqueeze(1).chunk(2, dim=-1)

    def turned(x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is not None and not norm_rotated:
            x = normalised(x, weight, norm_eps)
        x = rotated(x, cos, sin)
        return normalised(x, torch.ones(head_dim) if weight is None else weight, norm_eps) if norm_rotated else x

    if num_kv_heads:
        active_cache().write(layer, slot_mapping, turned(k, k_norm), v)
    return turned(q, q_norm).reshape(qkv.shape[0], num_heads * head_dim)


@rope_kv_write.register_fake
def _(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    layer: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    norm_eps: float,
    norm_rotated: bool = False,
) -> Tensor:
    return qkv.new_empty((qkv.shape[0], num_heads * head_dim), dtype=torch.float32)


def _bias(slopes: Tensor, at: Tensor, key_at: Tensor, scale: float, *, rounded: bool) -> Tensor:
    """ALiBi, float32 [H, T or 1, keys]: −slope times the distance from query back to key.

    rounded: Falcon's form: slope times the key's position, in bf16, scaled like scores.
    """
    if rounded:
        return (slopes.bfloat16()[:, None, None] * key_at.bfloat16()).float() * scale
    return slopes[:, None, None] * (key_at - at[:, None]).float()


@llmc_op("paged_attention")
def paged_attention(
    q: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_start: Tensor,
    token_seq: Tensor,
    positions: Tensor,
    layer: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    window: int,
    act_dtype: str = "f32",
    score_cap: float = 0.0,
    slopes: Tensor | None = None,
    rounded_bias: bool = False,
    sinks: Tensor | None = None,
    chunk: int = 0,
    causal: bool = True,
) -> Tensor:
    """Attention of q float32 [T, H hd] to each token's own sequence in the paged cache: act [T, H hd].

    A token at position p sees the keys max(0, p − window + 1) … p; window 0 means no limit.
    block_tables i32 [B, max_blocks], context_lens i32 [B], query_start i32 [B+1], token_seq and positions i32 [T].
    score_cap: scores are bounded to it by tanh; 0 for no bound.
    slopes: f32 [H] of an ALiBi bias (see `_bias`).
    sinks: f32 [H], an extra score per head that has a weight but no value.
    chunk: a token sees no key before the last multiple of it; 0 means no limit.
    causal: if false, a token also sees later keys in its context; with a window, those less than `window` away.
    """
    cache, groups = active_cache(), num_heads // num_kv_heads
    heads = q.float().view(q.shape[0], num_kv_heads, groups, head_dim)
    out = torch.empty_like(heads)
    for seq in token_seq.unique().tolist():
        rows = (token_seq == seq).nonzero().squeeze(1)
        at = positions[rows].long()
        keys, values = cache.read(layer, block_tables[seq], int(context_lens[seq]))
        key_at = torch.arange(keys.shape[0])
        seen = (key_at <= at[:, None]) | (not causal)
        if window:
            seen &= (key_at - at[:, None]).abs() < window
        if chunk:
            seen &= key_at >= at[:, None] // chunk * chunk
        scores = torch.einsum("tkgd,skd->kgts", heads[rows], keys) * scale
        if score_cap:
            scores = torch.tanh(scores / score_cap) * score_cap
        if slopes is not None:
            bias = _bias(slopes, at, key_at, scale, rounded=rounded_bias)
            scores = scores + bias.view(num_kv_heads, groups, -1, len(key_at))
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            sink = sinks.view(num_kv_heads, groups, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sink), dim=-1)
        weights = scores.softmax(dim=-1)[..., : len(key_at)]
        out[rows] = torch.einsum("kgts,skd->tkgd", weights, values)
    return out.view(q.shape[0], num_heads * head_dim).to(torch_act_dtype(act_dtype))


@paged_attention.register_fake
def _(
    q: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_start: Tensor,
    token_seq: Tensor,
    positions: Tensor,
    layer: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    window: int,
    act_dtype: str = "f32",
    score_cap: float = 0.0,
    slopes: Tensor | None = None,
    rounded_bias: bool = False,
    sinks: Tensor | None = None,
    chunk: int = 0,
    causal: bool = True,
) -> Tensor:
    return q.new_empty(q.shape, dtype=torch_act_dtype(act_dtype))


@llmc_op("gather_rows")
def gather_rows(x: Tensor, index: Tensor, count: int = 1) -> Tensor:
    """Rows of x [T, D] selected by index i32 [S], each with the next count − 1 behind it: [S, count D]."""
    rows = index.long()[:, None] + torch.arange(count, device=index.device)
    return x[rows].reshape(index.shape[0], count * x.shape[1])


@gather_rows.register_fake
def _(x: Tensor, index: Tensor, count: int = 1) -> Tensor:
    return x.new_empty((index.shape[0], count * x.shape[1]))


@llmc_op("pool_rows")
def pool_rows(x: Tensor, query_start: Tensor, token_seq: Tensor, index: Tensor, mean: bool) -> Tensor:
    """Pools the rows of sequences of x [T, D]: their mean, added in order, or their first row. Returns [S, D].

    index i32 [S]: last row of each sequence. query_start i32 [B+1], token_seq i32 [T].
    """
    rows = []
    for last in index.tolist():
        first = int(query_start[token_seq[last]])
        rows.append(x[first : last + 1].mean(dim=0) if mean else x[first])
    return torch.stack(rows) if rows else x[:0]


@pool_rows.register_fake
def _(x: Tensor, query_start: Tensor, token_seq: Tensor, index: Tensor, mean: bool) -> Tensor:
    return x.new_empty((index.shape[0], x.shape[1]))
