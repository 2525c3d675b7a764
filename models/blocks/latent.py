"""Latent attention: the cache keeps one key per token for all heads, and values are a part of that key.

The matrices that would expand a latent vector to a head's keys and values are applied to queries and results instead.
"""

from __future__ import annotations

from torch import Tensor

from llmc.models import latent_ops
from llmc.models.blocks.attention import StepInputs
from llmc.models.blocks.layers import Block, Linear, Projection, empty
from llmc.models.blocks.norms import RmsNorm
from llmc.models.config import Latent, ModelConfig


class LatentNorm(Block):
    """weight: float32 [R], for the latent vector before it is cached."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = empty(size)


class LatentAttention(Block):
    """q: [H (plain + rotated), D], or applied to the vector that q_a [Q, D] and q_norm make. kv: [R + rotated, D].
    key_up [H R, plain] and value_up [H value, R]: heads stacked. out: [D, H value]."""

    def __init__(self, config: ModelConfig, latent: Latent, layer: int, act_dtype: str) -> None:
        super().__init__()
        self.layer, self.num_heads, self.scale = layer, config.num_heads, config.attention_scale
        self.rope, self.eps, self.act_dtype = config.ropes.index(config.layer_rope(layer)), latent.norm_eps, act_dtype
        heads, hidden, bias = config.num_heads, config.hidden_size, config.attention_bias
        self.q_a = self.q_norm = None
        if latent.query_rank is not None:
            self.q_a = Linear(latent.query_rank, hidden, bias, act_dtype)
            self.q_norm = RmsNorm(latent.query_rank, latent.norm_eps, act_dtype)
        self.q = Linear(heads * latent.query_dim, latent.query_rank or hidden, False, act_dtype)
        self.kv = Linear(latent.key_dim, hidden, bias, act_dtype)
        self.kv_norm = LatentNorm(latent.rank)
        self.key_up = Projection(heads * latent.rank, latent.plain_dim, False, act_dtype)
        self.value_up = Projection(heads * latent.value_dim, latent.rank, False, act_dtype)
        self.out = Linear(hidden, heads * latent.value_dim, config.o_bias, act_dtype)

    def forward(self, x: Tensor, residual: Tensor | None, step: StepInputs) -> Tensor:
        """act [T, D], residual float32 [T, D] → float32 [T, D]."""
        q = self._queries(x)
        q_rotated = latent_ops.latent_kv_write(
            q,
            self.kv(x),
            self.kv_norm.weight,
            step.cos_sin[self.rope],
            step.positions,
            step.slot_mapping,
            self.layer,
            self.num_heads,
            self.eps,
        )
        attended = latent_ops.latent_attention(
            latent_ops.head_linear(q, self.key_up.weight, self.num_heads),
            q_rotated,
            step.block_tables,
            step.context_lens,
            step.query_start,
            step.token_seq,
            step.positions,
            self.layer,
            self.num_heads,
            self.scale,
        )
        values = latent_ops.packed_head_linear(attended, self.value_up.weight, self.num_heads, act_dtype=self.act_dtype)
        return self.out(values, residual)

    def _queries(self, x: Tensor) -> Tensor:
        """float32 [T, H (plain + rotated)]."""
        if self.q_a is None or self.q_norm is None:
            return self.q(x)
        return self.q(self.q_norm(self.q_a(x)))
