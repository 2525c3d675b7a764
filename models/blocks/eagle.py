"""An EAGLE drafting head: predicts the next hidden state from a token's embedding and the previous token's hidden
state."""

from __future__ import annotations

from torch import Tensor

from llmc.models import states_ops
from llmc.models.blocks.decoder import Decoder
from llmc.models.blocks.layers import Linear
from llmc.models.blocks.norms import Rounded
from llmc.models.config import ModelConfig


class EagleHead(Decoder):
    """Layers after fc [hidden_size, 2 hidden_size], which reads embeddings and states.

    The head predicts the output of the model's last norm, so it has no norm after its layers.
    """

    def __init__(self, config: ModelConfig, act_dtype: str, max_len: int) -> None:
        super().__init__(config, act_dtype, max_len)
        self.norm = Rounded(act_dtype)
        self.fc = Linear(config.hidden_size, 2 * config.hidden_size, config.fc_bias, act_dtype)

    def embedded(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """int32 [T] → float32 [T, D]."""
        return self.fc(self.rounded(states_ops.beside_states(super().embedded(input_ids, positions))))

    def sampled(self, x: Tensor, sample_index: Tensor, of_layers: list[Tensor]) -> Tensor:
        """float32 [T, D] → float32 [S, D]; also exports the predicted states of all rows."""
        return states_ops.gather_rows_leaving(x, sample_index, x)
