"""An EAGLE-3 drafting head: one layer over a token's embedding and the previous token's state, side by side.

The model that it drafts for joins the rows of several layers to such states; later states are the head's own rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmc.models import states_ops
from llmc.models.blocks.attention import StepInputs
from llmc.models.blocks.decoder import Decoder, DecoderLayer
from llmc.models.blocks.layers import Linear
from llmc.models.blocks.norms import rows_norm
from llmc.models.config import ModelConfig


class Eagle3Layer(DecoderLayer):
    """A layer whose qkv [(H + 2 Hkv) hd, 2 D] reads the normed embedding, then the normed state, of a token."""

    def __init__(self, config: ModelConfig, act_dtype: str) -> None:
        super().__init__(config, 0, act_dtype)
        self.attention.qkv = Linear(sum(config.qkv_parts(0)), 2 * config.hidden_size, config.attention_bias, act_dtype)
        self.embed_norm, self.states_norm = rows_norm(config), rows_norm(config)
        self.normed_states = config.normed_states

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        """Embeddings and states, float32 [T, 2 D] → float32 [T, D]."""
        assert self.mlp_norm is not None
        size = x.shape[-1] // 2
        states = x[:, size:]
        normed = self.states_norm(states)
        beside = self.attention_norm(torch.cat((self.embed_norm(x[:, :size]), normed), dim=-1))
        x = self.attention(beside, normed if self.normed_states else states, step)
        return self.mlp(self.mlp_norm(x), x)


class Eagle3Head(Decoder):
    """The layer, then norm and output projection of the head's own vocabulary."""

    def layer(self, number: int, act_dtype: str) -> Eagle3Layer:
        return Eagle3Layer(self.config, act_dtype)

    def embedded(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """int32 [T] → float32 [T, 2 D]: the embedding and the state of each token."""
        return states_ops.beside_states(super().embedded(input_ids, positions))

    def sampled(self, x: Tensor, sample_index: Tensor, of_layers: list[Tensor]) -> Tensor:
        """float32 [T, D] → float32 [S, D]; also exports all rows, the next states."""
        return states_ops.gather_rows_leaving(x, sample_index, x)
