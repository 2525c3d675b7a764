"""The mixture-of-experts feed-forward block; each token uses a few experts."""

from __future__ import annotations

import torch
from torch import Tensor

from llmc.models import expert_ops, ops
from llmc.models.blocks.attention import StepInputs
from llmc.models.blocks.layers import ActivatedLinear, Block, GatedLinear, Linear, Projection, empty
from llmc.models.config import Experts, ModelConfig


class SharedExpert(Block):
    """gate_up: [2 I, D], gate first, or up: [I, D]. down: [D, I]."""

    def __init__(self, config: Experts, hidden: int, act_dtype: str) -> None:
        super().__init__()
        self.gated, inner = config.gated, config.shared_size
        if config.gated:
            self.gate_up = GatedLinear(inner, hidden, False, act_dtype)
        else:
            self.up = ActivatedLinear(inner, hidden, False, act_dtype, config.activation)
        self.down = Linear(hidden, inner, False, act_dtype)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """act [T, D], residual float32 [T, D] → float32 [T, D]."""
        return self.down(self.gate_up(x) if self.gated else self.up(x), residual)


class RoutedExperts(Block):
    """gate_up: [E 2 I, D], gate before up in each expert, or up alone, [E I, D]. down: [E D, I]. E: the experts held
    here."""

    def __init__(self, config: Experts, hidden: int, act_dtype: str) -> None:
        super().__init__()
        self.config, self.act_dtype = config, act_dtype
        self.held = config.count if config.held is None else config.held
        first = (2 if config.gated else 1) * config.intermediate_size
        self.gate_up = Projection(self.held * first, hidden, config.biases, act_dtype)
        self.down = Projection(self.held * hidden, config.intermediate_size, config.biases, act_dtype)

    def forward(self, x: Tensor, chosen: Tensor, residual: Tensor | None) -> Tensor:
        """act [T, D], i32 [T, 2 k], residual float32 [T, D] → float32 [T, D]."""
        return expert_ops.experts(
            x,
            chosen,
            self.gate_up.weight,
            self.down.weight,
            self.gate_up.bias,
            self.down.bias,
            residual,
            self.held,
            self.config.gate_limit,
            self.config.gate_gain,
            act_dtype=self.act_dtype,
            some=self.config.held is not None,
            activation=self.config.activation,
            gated=self.config.gated,
        )


def mixed(logits: Tensor, noise: float) -> Tensor:
    """Sparse mixing of logits float32 [T, E]: scores the best two, each by its share of a softmax over nearby logits.

    A logit is near a best one if it is below by at most 2 · noise, relative to the larger magnitude of both. The first
    is not near the second. Two equal best logits both get the first's score; scores of other experts are arbitrary.
    """
    best = logits.amax(-1, keepdim=True)
    below = logits < best
    others = torch.where(below, logits, float("-inf"))
    equal = torch.where(below, 0.0, 1.0).sum(-1, keepdim=True) - 1.0
    second = torch.where(equal > 0.0, best, others.amax(-1, keepdim=True))

    def near(values: Tensor, to: Tensor) -> Tensor:
        """The softmax sum over logits near `to`, which itself counts as 1: [T, 1]."""
        far = (to - values) / torch.maximum(logits.abs(), to) > 2.0 * noise
        return torch.where(far, 0.0, torch.exp(values - to)).sum(-1, keepdim=True)

    return 1.0 / torch.where(below, near(others, second) + equal, near(logits, best))


def choose(experts: Experts, choice: Tensor, scores: Tensor, expert_scales: Tensor | None = None) -> Tensor:
    """`expert_ops.choose_experts` as a model does it."""
    return expert_ops.choose_experts(
        choice,
        scores,
        experts.top_k,
        experts.groups,
        experts.top_groups,
        experts.best_of_group,
        experts.normalised,
        experts.least_sum,
        experts.scale,
        expert_scales,
        experts.added_sum,
    )


class ExpertMlp(Block):
    """router: [E, D]. The experts, and optionally a shared expert. latent_in: [L, D], latent_out: [D, L], if experts
    read and write vectors of L elements."""

    choice_bias: Tensor | None

    def __init__(self, config: ModelConfig, act_dtype: str) -> None:
        super().__init__()
        assert config.experts is not None
        self.config = config.experts
        count, hidden, shared = config.experts.count, config.hidden_size, config.experts.shared_size
        self.router = Linear(count, hidden, config.experts.router_bias, act_dtype)
        self.register_parameter("choice_bias", empty(count) if config.experts.choice_bias else None)
        latent, self.act_dtype = config.experts.latent_size, act_dtype
        self.latent_in = Linear(latent, hidden, False, act_dtype) if latent else None
        self.experts = RoutedExperts(config.experts, latent or hidden, act_dtype)
        self.latent_out = Linear(hidden, latent, False, act_dtype) if latent else None
        self.shared = SharedExpert(config.experts, hidden, act_dtype) if shared else None
        self.shared_gate = Linear(1, hidden, False, act_dtype) if config.experts.shared_gate else None

    def forward(self, x: Tensor, residual: Tensor | None, step: StepInputs) -> Tensor:
        """act [T, D], residual float32 [T, D] → float32 [T, D]."""
        if self.shared is not None:
            residual = self._shared(self.shared, x, residual)
        logits = self.router(x)
        chosen = self._chosen(logits)
        if step.expert_places is not None:
            chosen = expert_ops.held_experts(chosen, step.expert_places)
        if self.config.scaled_input:
            x = (x.float() * torch.sigmoid(logits.amax(-1, keepdim=True))).to(x.dtype)
        if self.latent_in is None or self.latent_out is None:
            return self.experts(x, chosen, residual)
        act = ops.torch_act_dtype(self.act_dtype)
        return self.latent_out(self.experts(self.latent_in(x).to(act), chosen, None).to(act), residual)

    def _scores(self, logits: Tensor) -> Tensor:
        """float32 [T, E] of the router's logits [T, E]."""
        match self.config.scores:
            case "softmax":
                return logits.softmax(-1)
            case "sigmoid":
                return torch.sigmoid(logits)
            case "mixer":
                return mixed(logits, self.config.mixer_noise)

    def _chosen(self, logits: Tensor) -> Tensor:
        """i32 [T, 2 k], in the form of `choose_experts`."""
        scores = self._scores(logits)
        # If nothing is added to scores, logits have the same order and no ties from rounding.
        choice = logits if self.choice_bias is None else scores + self.choice_bias
        return choose(self.config, choice, scores)

    def _shared(self, shared: Block, x: Tensor, residual: Tensor | None) -> Tensor:
        """The shared expert's output for x, plus the residual."""
        if self.shared_gate is None:
            return shared(x, residual)
        made = shared(x, None) * torch.sigmoid(self.shared_gate(x))
        return made if residual is None else made + residual
