"""Attention over the paged cache, with one fused projection of q, k and v."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from llmc.models import ops
from llmc.models.blocks.layers import Block, Linear, RmsNorm
from llmc.models.config import ModelConfig


@dataclass(frozen=True)
class StepInputs:
    """What every layer of one step reads; int32 except cos_sin.

    positions, slot_mapping, token_seq [T]; block_tables [B, max_blocks]; context_lens [B]; query_start [B+1];
    cos_sin float32 [max_len, rotary_dim].
    """

    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    context_lens: Tensor
    query_start: Tensor
    token_seq: Tensor
    cos_sin: Tensor


class Attention(Block):
    """qkv [(H + 2 Hkv) hd, D] and out [D, H hd] around rotation, cache and attention of one layer."""

    def __init__(self, config: ModelConfig, layer: int, act_dtype: str) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.scale = config.head_dim**-0.5
        self.window = config.layer_windows[layer]
        self.eps = config.rms_norm_eps
        self.act_dtype = act_dtype
        self.qkv = Linear(config.qkv_size, config.hidden_size, config.attention_bias, act_dtype)
        self.q_norm = RmsNorm(config.head_dim, config.rms_norm_eps, act_dtype) if config.qk_norm else None
        self.k_norm = RmsNorm(config.head_dim, config.rms_norm_eps, act_dtype) if config.qk_norm else None
        self.out = Linear(config.hidden_size, config.num_heads * config.head_dim, config.o_bias, act_dtype)

    def forward(self, x: Tensor, residual: Tensor, step: StepInputs) -> Tensor:
        """act [T, D], residual float32 [T, D] → float32 [T, D]."""
        q = ops.rope_kv_write(
            self.qkv(x),
            self.q_norm.weight if self.q_norm is not None else None,
            self.k_norm.weight if self.k_norm is not None else None,
            step.cos_sin,
            step.positions,
            step.slot_mapping,
            self.layer,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.eps,
        )
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
        )
        return self.out(attended, residual)
