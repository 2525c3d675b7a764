"""A model's own layer for multi-token prediction, as a drafting head: the token's embedding and the previous token's
state, each normed, make the input of a layer like the model's."""

from __future__ import annotations

import torch
from torch import Tensor

from llmc.models import states_ops
from llmc.models.blocks.decoder import Decoder
from llmc.models.blocks.layers import Linear
from llmc.models.blocks.norms import rows_norm
from llmc.models.config import ModelConfig


class MtpHead(Decoder):
    """One layer after fc [hidden_size, 2 hidden_size]. The rows behind its norm are the states of later tokens, as
    those of the model are."""

    def __init__(self, config: ModelConfig, act_dtype: str, max_len: int) -> None:
        super().__init__(config, act_dtype, max_len)
        self.states_norm = rows_norm(config)
        self.token_norm, self.state_norm = rows_norm(config), rows_norm(config)
        self.fc = Linear(config.hidden_size, 2 * config.hidden_size, False, act_dtype)

    def embedded(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """int32 [T] → float32 [T, D]."""
        beside = states_ops.beside_states(super().embedded(input_ids, positions))
        size = self.config.hidden_size
        token, state = self.token_norm(beside[:, :size]), self.state_norm(beside[:, size:])
        return self.fc(self.rounded(torch.cat((token, state), dim=-1)))
