"""Attention and a Mamba-2 mixer side by side, as in Falcon-H1 (https://arxiv.org/abs/2507.22448)."""

from __future__ import annotations

from torch import Tensor

from llmc.models.blocks.attention import Attention, StepInputs
from llmc.models.blocks.mamba import Mamba2Mixer
from llmc.models.config import ModelConfig
from llmc.models.mamba import Mamba2


class AttentionBesideMamba(Attention):
    """Both read the same rows, and both results are added."""

    def __init__(self, config: ModelConfig, net: Mamba2, layer: int, act_dtype: str) -> None:
        super().__init__(config, layer, act_dtype)
        self.mamba = Mamba2Mixer(config, net, layer, act_dtype)

    def forward(self, x: Tensor, residual: Tensor | None, step: StepInputs) -> Tensor:
        """act [T, D], residual float32 [T, D] → float32 [T, D]."""
        return self.mamba(x, super().forward(x, residual, step), step)
