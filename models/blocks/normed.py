"""Layers that add blocks to their normed inputs instead of to the residual itself, as in MiniMax-Text-01."""

from __future__ import annotations

from torch import Tensor

from llmc.models.blocks.attention import StepInputs
from llmc.models.blocks.decoder import Decoder, DecoderLayer
from llmc.models.blocks.layers import Block
from llmc.models.blocks.norms import Rounded, result_norm
from llmc.models.config import ModelConfig


class NormedLayer(DecoderLayer):
    """x = kept · norm(x) + added · block(norm(x)), for attention, then for the feed-forward block.

    kept and added are those of `ModelConfig.residual_factors`.
    """

    def __init__(self, config: ModelConfig, layer: int, act_dtype: str) -> None:
        super().__init__(config, layer, act_dtype)
        assert config.residual_factors is not None
        self.factors = config.residual_factors
        self.attention_norm, self.mlp_norm = result_norm(config, act_dtype), result_norm(config, act_dtype)
        self.rounded = Rounded(act_dtype)

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        """float32 [T, D] → float32 [T, D]."""
        assert self.mlp_norm is not None
        factors, of_mlp = self.factors, (step,) if self.mixed else ()
        x = self._sum(self.attention, self.attention_norm(x), factors.attention_kept, factors.attention_added, step)
        return self._sum(self.mlp, self.mlp_norm(x), factors.mlp_kept, factors.mlp_added, *of_mlp)

    def _sum(self, block: Block, normed: Tensor, kept: float, added: float, *step: StepInputs) -> Tensor:
        """The normed input and the block's result for it, each times its factor."""
        residual = normed if kept == 1.0 else normed * kept
        if added == 1.0:
            return block(self.rounded(normed), residual, *step)
        return residual + block(self.rounded(normed), None, *step) * added


class NormedDecoder(Decoder):
    """A decoder of such layers."""

    def layer(self, number: int, act_dtype: str) -> NormedLayer:
        return NormedLayer(self.config, number, act_dtype)
