"""Layers of one block: attention or what is in its place, or a feed-forward block."""

from __future__ import annotations

from torch import Tensor

from llmc.models.blocks.attention import StepInputs
from llmc.models.blocks.kinds import attention_of, feed_forward_of, has_experts
from llmc.models.blocks.layers import RepeatedBlock
from llmc.models.blocks.norms import norm
from llmc.models.config import ModelConfig


class MixerLayer(RepeatedBlock):
    """A norm, then attention or what is in its place, whose result is added to the layer's input."""

    def __init__(self, config: ModelConfig, layer: int, act_dtype: str) -> None:
        super().__init__()
        self.attention_norm = norm(config, act_dtype)
        self.attention = attention_of(config, layer, act_dtype)

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        """float32 [T, D] → float32 [T, D]."""
        return self.attention(self.attention_norm(x), x, step)


class MlpLayer(RepeatedBlock):
    """A norm, then a feed-forward block, whose result is added to the layer's input."""

    def __init__(self, config: ModelConfig, layer: int, act_dtype: str) -> None:
        super().__init__()
        self.mixed = has_experts(config, layer)
        self.mlp_norm = norm(config, act_dtype)
        self.mlp = feed_forward_of(config, layer, act_dtype)

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        """float32 [T, D] → float32 [T, D]."""
        return self.mlp(self.mlp_norm(x), x, *((step,) if self.mixed else ()))
