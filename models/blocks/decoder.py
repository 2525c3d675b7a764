"""The decoder: embedding, pre-norm layers, final norm and logits of the sampled rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from llmc.models import ops
from llmc.models.blocks.attention import Attention, StepInputs
from llmc.models.blocks.layers import Block, Linear, RmsNorm, empty
from llmc.models.blocks.mlp import Mlp
from llmc.models.config import ModelConfig


class Embedding(Block):
    """weight [V, D] of the activation dtype."""

    def __init__(self, config: ModelConfig, act_dtype: str) -> None:
        super().__init__()
        self.weight = empty(config.vocab_size, config.hidden_size, dtype=ops.torch_act_dtype(act_dtype))

    def forward(self, ids: Tensor) -> Tensor:
        """int32 [T] → float32 [T, D]."""
        return ops.embedding(ids, self.weight)


class Rope(nn.Module):
    """Holds the buffer cos_sin, float32 [max_len, rotary_dim]; its value is `rope.cos_sin_table`."""

    cos_sin: Tensor

    def __init__(self, config: ModelConfig, max_len: int) -> None:
        super().__init__()
        self.register_buffer("cos_sin", torch.empty((max_len, config.rotary_dim), dtype=torch.float32))


class DecoderLayer(Block):
    """One layer; both residual adds happen inside the linear that ends a block."""

    def __init__(self, config: ModelConfig, layer: int, act_dtype: str) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(config.hidden_size, config.rms_norm_eps, act_dtype)
        self.attention = Attention(config, layer, act_dtype)
        self.mlp_norm = RmsNorm(config.hidden_size, config.rms_norm_eps, act_dtype)
        self.mlp: Block = Mlp(config, act_dtype)

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        """float32 [T, D] → float32 [T, D]."""
        x = self.attention(self.attention_norm(x), x, step)
        return self.mlp(self.mlp_norm(x), x)


class Decoder(Block):
    """A whole model. Parameters are frozen and without values until they are loaded.

    act_dtype: "f32" or "bf16", of activations that feed a linear and of linear weights. max_len: positions of the
    rotary table. With tied embeddings lm_head.weight is the embedding's parameter and has no name of its own.
    """

    def __init__(self, config: ModelConfig, act_dtype: str, max_len: int) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config, act_dtype)
        self.rope = Rope(config, max_len)
        self.layers = nn.ModuleList(DecoderLayer(config, i, act_dtype) for i in range(config.num_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps, act_dtype)
        self.lm_head = Linear(config.vocab_size, config.hidden_size, False, act_dtype)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed.weight

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        query_start: Tensor,
        sample_index: Tensor,
        token_seq: Tensor,
    ) -> Tensor:
        """int32 inputs of one packed step (see StepInputs; sample_index [S]) → logits float32 [S, V]."""
        step = StepInputs(
            positions, slot_mapping, block_tables, context_lens, query_start, token_seq, self.rope.cos_sin
        )
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, step)
        return self.lm_head(self.norm(ops.gather_rows(x, sample_index)))
