"""Attention over the paged cache, with one fused projection of q, k and v."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from llmc.models import ops
from llmc.models.blocks.layers import Block, Linear, empty
from llmc.models.blocks.norms import centred, over_root_mean_square
from llmc.models.config import ModelConfig, QueryGrowth


@dataclass(frozen=True)
class StepInputs:
    """The inputs of a step that every layer reads; int32 except cos_sin and slopes.

    positions, slot_mapping, token_seq [T]; block_tables [B, max_blocks]; context_lens [B]; query_start [B+1].
    state_slots: [B, 3], see `delta_ops`; None if no layer has a state.
    cos_sin: float32 [max_len, rotated elements] for each of `ModelConfig.ropes`. turned_at: [T], a token's row of
    these; None for its position.
    slopes: float32 [H] with ALiBi, else None.
    expert_places: float32 [E] if another rank holds some of E experts, else None.
    """

    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    context_lens: Tensor
    query_start: Tensor
    token_seq: Tensor
    cos_sin: tuple[Tensor, ...]
    slopes: Tensor | None = None
    expert_places: Tensor | None = None
    state_slots: Tensor | None = None
    turned_at: Tensor | None = None

    @property
    def cos_sin_rows(self) -> Tensor:
        """Rows of `cos_sin` by which tokens are rotated."""
        return self.positions if self.turned_at is None else self.turned_at

    @property
    def of_states(self) -> tuple[Tensor, Tensor, Tensor]:
        """What ops of a layer with a state read."""
        assert self.state_slots is not None
        return self.state_slots, self.query_start, self.positions


def _grown(positions: Tensor, growth: QueryGrowth) -> Tensor:
    """Factors of queries that grow with position, float32 [T, 1]."""
    if growth.kind == "log":
        return torch.clamp(torch.log(positions[:, None].float() + 1.0) / math.log(growth.every), min=1.0)
    first = 1.0 if growth.kind == "steps" else 0.0
    passed = torch.floor((positions[:, None].float() + first) / growth.every)
    return 1.0 + growth.factor * torch.log(1.0 + passed)


class HeadNorm(Block):
    """weight: float32 [hd], shared by all heads, or [heads hd]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = empty(size)


class Attention(Block):
    """Attention of a layer: qkv [(H + 2 Hkv) hd, D], rotation, cache, attention, out [D, H hd]. sinks: [H] or None.

    With a gate, qkv has H hd rows more, the first ones. Attention's result is multiplied by the sigmoid of theirs.
    In a layer that reads another layer's keys and values, qkv has only the rows of q; where keys are values, those of
    q and k.
    """

    sinks: Tensor | None

    def __init__(self, config: ModelConfig, layer: int, act_dtype: str) -> None:
        super().__init__()
        self.layer, self.causal = config.kv_layer(layer), not config.bidirectional
        self.makes_kv, self.normed_values = config.makes_kv(layer), config.normed_values
        heads = config.heads(layer)
        self.num_heads, self.num_kv_heads, self.head_dim = heads.num_heads, heads.num_kv_heads, heads.head_dim
        self.keys_are_values = heads.keys_are_values and self.makes_kv
        self.scale, self.cap = config.attention_scale, config.attention_cap
        self.rounded_bias = config.alibi is not None and config.alibi.rounded
        self.window = config.layer_windows[layer]
        rope = config.layer_rope(layer)
        self.rope = config.ropes.index(rope)
        self.moved_pairs = rope.moved_pairs
        self.norm, self.qk_norm, self.eps, self.clip = config.norm, config.qk_norm, config.norm_eps, config.clip_qkv
        self.act_dtype = act_dtype
        self.chunk = config.layer_chunks[layer] if config.layer_chunks else 0
        rotates = layer not in config.unrotated_layers
        self.norm_rotated = rotates if config.qk_norm == "unit" else config.qk_norm_rotated
        growth = config.query_growth
        self.growth = growth if growth is not None and (growth.kind != "steps" or not rotates) else None
        self.register_parameter("sinks", empty(heads.num_heads) if config.sinks else None)
        self.gate_size = heads.q_size if config.attention_gate else 0
        self.qkv = Linear(sum(config.qkv_parts(layer)), config.hidden_size, config.attention_bias, act_dtype)
        self.q_norm = self.k_norm = None
        if config.qk_norm not in ("none", "unit"):
            each = config.qk_norm != "head"
            self.q_norm = HeadNorm(heads.head_dim * (heads.num_heads if each else 1))
            if self.makes_kv:
                self.k_norm = HeadNorm(heads.head_dim * (heads.num_kv_heads if each else 1))
        self.out = Linear(config.hidden_size, heads.q_size, config.o_bias, act_dtype)

    def forward(self, x: Tensor, residual: Tensor | None, step: StepInputs) -> Tensor:
        """act [T, D], residual float32 [T, D] → float32 [T, D]."""
        q_norm, k_norm = self.q_norm, self.k_norm if self.makes_kv else self.q_norm
        norms_heads = q_norm is not None and k_norm is not None and self._is_fused
        made, gate = self.qkv(x), None
        if self.gate_size:
            gate, made = made[:, : self.gate_size], made[:, self.gate_size :]
        q = ops.rope_kv_write(
            self._prepared(made),
            q_norm.weight if norms_heads and q_norm is not None else None,
            k_norm.weight if norms_heads and k_norm is not None else None,
            step.cos_sin[self.rope],
            step.cos_sin_rows,
            step.slot_mapping,
            self.layer,
            self.num_heads,
            self.num_kv_heads if self.makes_kv else 0,
            self.head_dim,
            self.eps,
            norm_rotated=self.norm_rotated,
        )
        if self.growth is not None:
            q = q * _grown(step.positions, self.growth)
        attended = ops.paged_attention(
            q,
            step.block_tables,
            step.context_lens,
            step.query_start,
            step.token_seq,
            step.positions,
            self.layer,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.scale,
            self.window,
            act_dtype=self.act_dtype,
            score_cap=self.cap or 0.0,
            slopes=step.slopes,
            rounded_bias=self.rounded_bias,
            sinks=self.sinks,
            chunk=self.chunk,
            causal=self.causal,
        )
        if gate is not None:
            attended = (attended.float() * torch.sigmoid(gate)).to(attended.dtype)
        return self.out(attended, residual)

    @property
    def _is_fused(self) -> bool:
        """Whether the rope op also applies the norm."""
        return self.qk_norm == "head" and self.norm == "rms"

    def _prepared(self, qkv: Tensor) -> Tensor:
        """float32 [T, (H + 2 Hkv) hd]: with values, clipped and normed."""
        if self.keys_are_values:
            qkv = torch.cat((qkv, self._in_order(qkv[:, self.num_heads * self.head_dim :])), dim=-1)
        if self.clip is not None:
            qkv = qkv.clamp(min=-self.clip, max=self.clip)
        if self.normed_values and self.makes_kv:
            count = self.num_kv_heads * self.head_dim
            before, v = qkv.split([qkv.shape[-1] - count, count], dim=-1)
            heads = over_root_mean_square(v.view(v.shape[0], -1, self.head_dim), self.eps)
            qkv = torch.cat((before, heads.reshape(v.shape)), dim=-1)
        if self.q_norm is None or self.k_norm is None or self._is_fused:
            return qkv
        sizes = [self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim]
        q, k, v = qkv.split([*sizes, sizes[1]], dim=-1)
        return torch.cat((self._normed(q, self.q_norm.weight), self._normed(k, self.k_norm.weight), v), dim=-1)

    def _in_order(self, keys: Tensor) -> Tensor:
        """float32 [T, Hkv hd]: undoes `row_orders.rotated_first`."""
        if not self.moved_pairs:
            return keys
        heads, pairs, half = keys.view(keys.shape[0], -1, self.head_dim), self.moved_pairs, self.head_dim // 2
        ends = (0, pairs), (2 * pairs, half + pairs), (pairs, 2 * pairs), (half + pairs, 2 * half)
        return torch.cat([heads[:, :, first:last] for first, last in ends], dim=-1).reshape(keys.shape)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """float32 [T, heads hd]."""
        normed = over_root_mean_square if self.norm == "rms" else centred
        if self.qk_norm == "whole":
            return normed(x, self.eps) * weight
        heads = normed(x.view(x.shape[0], -1, self.head_dim), self.eps)
        weight = weight.view(-1, self.head_dim)
        return (heads * weight).reshape(x.shape)
