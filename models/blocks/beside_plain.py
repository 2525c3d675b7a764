"""Experts beside a plain feed-forward block, each with norms of its own, as in Gemma 4."""

from __future__ import annotations

from torch import Tensor

from llmc.models import expert_ops
from llmc.models.blocks.attention import StepInputs
from llmc.models.blocks.experts import RoutedExperts, choose
from llmc.models.blocks.layers import Linear, empty
from llmc.models.blocks.mlp import Mlp
from llmc.models.blocks.norms import norm, result_norm
from llmc.models.config import ModelConfig


class MlpBesideExperts(Mlp):
    """The plain block, and experts that read the same hidden vector through norms of their own.

    router: [E, D]. expert_scales: float32 [E], factors of the experts' weights.
    """

    expert_scales: Tensor | None

    def __init__(self, config: ModelConfig, layer: int, act_dtype: str) -> None:
        super().__init__(config, layer, act_dtype)
        assert config.experts is not None
        self.config = config.experts
        self.post_norm, self.experts_post_norm = result_norm(config, act_dtype), result_norm(config, act_dtype)
        self.router_norm, self.experts_norm = norm(config, act_dtype), norm(config, act_dtype)
        self.router = Linear(self.config.count, config.hidden_size, False, act_dtype)
        self.register_parameter("expert_scales", empty(self.config.count) if self.config.scaled else None)
        self.experts = RoutedExperts(self.config, config.hidden_size, act_dtype)

    def beside(self, x: Tensor, normed: Tensor, step: StepInputs) -> Tensor:
        """float32 [T, D], and act [T, D] that the plain block reads → float32 [T, D]: the sum of both results."""
        made = self.post_norm(super().forward(normed, None))
        logits = self.router(self.router_norm(x))
        chosen = choose(self.config, logits, logits.softmax(-1), self.expert_scales)
        if step.expert_places is not None:
            chosen = expert_ops.held_experts(chosen, step.expert_places)
        return made + self.experts_post_norm(self.experts(self.experts_norm(x), chosen, None))
