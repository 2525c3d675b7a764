"""The gated feed-forward block, with one fused projection of gate and up."""

from __future__ import annotations

from torch import Tensor

from llmc.models.blocks.layers import Block, GatedLinear, Linear
from llmc.models.config import ModelConfig


class Mlp(Block):
    """gate_up [2 I, D], gate first, and down [D, I]."""

    def __init__(self, config: ModelConfig, act_dtype: str) -> None:
        super().__init__()
        self.gate_up = GatedLinear(config.intermediate_size, config.hidden_size, config.mlp_bias, act_dtype)
        self.down = Linear(config.hidden_size, config.intermediate_size, config.mlp_bias, act_dtype)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """act [T, D], residual float32 [T, D] → float32 [T, D]."""
        return self.down(self.gate_up(x), residual)
